"""The notebooks run from top to bottom, and an interrupted cell leaves the kernel and the run usable.

They need the extra `notebooks`, which `make release` installs.
"""

from __future__ import annotations

import pathlib
import queue
import time

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `notebooks` is not installed")
nbclient = pytest.importorskip("nbclient", reason="the extra `notebooks` is not installed")
pytest.importorskip("ipykernel", reason="the extra `notebooks` is not installed")
pytestmark = pytest.mark.release

FOLDER = pathlib.Path(__file__).resolve().parents[2] / "examples" / "notebooks"
# By notebook, what the outputs of its cells hold, in this order.
SHOWN = {
    "first_run": ["return, greedy", "<img", "<video", "array", "max_env_steps"],
    "compare": ["return, greedy", "<img", "<img", "notebook-clip-0.2-2"],
    "own_agent": ["return, greedy", "<img", "'gap'"],
}


def shown(notebook):
    """What each cell shows: its outputs as one text."""
    return [
        "".join(
            str(output.get("text", "")) + "".join(output.get("data", {}).values()) for output in cell.outputs
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def test_every_notebook_is_tested_and_has_no_outputs():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == SHOWN.keys()
    for path in FOLDER.glob("*.ipynb"):
        assert "".join(shown(nbformat.read(path, as_version=4))) == "", f"clear the outputs of {path.name}"


@pytest.mark.parametrize("name", SHOWN)
def test_notebooks_run(name, tmp_path):
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    options = {"timeout": 100, "kernel_name": "python3", "resources": {"metadata": {"path": str(tmp_path)}}}
    begin = time.monotonic()
    nbclient.NotebookClient(notebook, **options).execute()
    texts = iter(shown(notebook))
    for part in SHOWN[name]:
        assert any(part in text for text in texts), part
    print(f"{name}: {time.monotonic() - begin:.0f} s")


class Kernel:
    """A kernel of Jupyter in a folder."""

    def __init__(self, folder):
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3", cwd=str(folder))

    def wait_for(self, text, timeout=60.0):
        """Waits until an output has `text`, and returns it."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                content = str(self.client.get_iopub_msg(timeout=1.0)["content"])
            except queue.Empty:
                continue
            if text in content:
                return content
        raise TimeoutError(f"no output has {text!r}")

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.mark.parametrize("engine", ["serial", "threads", "processes"])
def test_an_interrupted_cell_leaves_the_kernel_and_the_run(engine, tmp_path, request):
    kernel = Kernel(tmp_path)
    request.addfinalizer(kernel.stop)
    call = f"framework.train('ppo', 'gymnasium:CartPole-v1', engine='{engine}', directory='run', "
    call += "evaluate_period=5_000, "
    # An error would abort the cells that wait, too.
    cell = f"import framework; {call} max_env_steps=10_000_000, target_return=None)"
    kernel.client.execute(cell, stop_on_error=False)
    kernel.wait_for("learner steps/s")  # It has learned by then.
    kernel.manager.interrupt_kernel()
    kernel.wait_for("ProgramInterrupted")
    kernel.client.execute(
        "run = framework.runs.Run('run'); before = run.policy('latest').step; print('at', before)"
    )
    kernel.wait_for("at ")
    kernel.client.execute(
        f"{call} max_env_steps=before + 2_000, target_return=None).policy('latest').step - before"
    )
    kernel.wait_for("'text/plain': '20")  # A little more than 2,000.
