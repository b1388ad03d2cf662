"""Checkpoints: what comes back is what was saved, or an error that says why not."""

import concurrent.futures
import contextlib
import enum
import errno
import fcntl
import functools
import hashlib
import json
import os
import pathlib
import resource
import shutil
from collections import OrderedDict, namedtuple
from importlib import metadata

import numpy as np
import pytest
import warm_python

from framework.checkpoints import Checkpointer, CheckpointError, torch_part
from framework.checkpoints.folder import open_checkpoint

torch = pytest.importorskip("torch")


def write_folder(path):
    (path / "tables").mkdir(parents=True)
    (path / "tables" / "rows.bin").write_bytes(b"rows")
    (path / "index").write_bytes(b"")


def parts(value=0):
    return {
        "learner": torch_part({"w": torch.full((3,), float(value))}),
        "note": b"abc",
        "replay": write_folder,
    }


@pytest.fixture
def checkpointer(tmp_path):
    return Checkpointer(tmp_path / "checkpoints", keep=3)


def unfinished(checkpointer):
    return [name for name in os.listdir(checkpointer.directory) if name.startswith(".writing-")]


def test_round_trip(checkpointer):
    path = checkpointer.save(7, parts(5), note={"environment": "CartPole"})
    reader = checkpointer.restore()
    assert reader.path == path == checkpointer.latest()
    assert reader.step == 7 and reader.names == ("learner", "note", "replay")
    assert reader.state("learner")["w"].tolist() == [5.0] * 3
    assert reader.part("note").read_bytes() == b"abc"
    assert (reader.part("replay") / "tables" / "rows.bin").read_bytes() == b"rows"
    assert reader.manifest["note"] == {"environment": "CartPole"}
    assert reader.manifest["versions"]["torch"] == metadata.version("torch")
    with pytest.raises(CheckpointError, match="no part 'optimizer'; it has learner, note, replay"):
        reader.part("optimizer")


def test_only_the_newest_are_kept(checkpointer):
    for step in range(5):
        checkpointer.save(step, parts(step))
    assert [open_checkpoint(p).step for p in checkpointer.checkpoints()] == [2, 3, 4]
    assert len(os.listdir(checkpointer.directory)) == 3


def test_all_is_on_disk_before_the_folder_has_its_name_and_then_the_name(checkpointer, monkeypatch):
    done, fsync, rename = [], os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "rename", lambda old, new: (done.append(new), rename(old, new)))
    path = checkpointer.save(7, parts())
    at = done.index(path)
    assert {each.stat().st_ino for each in [path, *path.rglob("*")]} <= set(done[:at])
    assert done[at + 1 :] == [checkpointer.directory.stat().st_ino]


def test_the_newest_is_the_last_saved_not_the_highest_step(checkpointer):
    for step in (100, 50, 50):
        checkpointer.save(step, parts())
    assert checkpointer.restore().step == 50
    assert checkpointer.restore("previous").step == 50
    assert checkpointer.restore(100).step == 100


def test_which(checkpointer):
    checkpointer.save(10, parts(0))  # The later one of a step counts, and not one whose number ends like it.
    paths = [checkpointer.save(step, parts(step)) for step in (10, 110)]
    assert checkpointer.restore("latest").path == paths[1]
    assert checkpointer.restore("10").path == paths[0]
    assert checkpointer.restore(paths[0]).path == paths[0]
    assert checkpointer.restore(paths[0].name).path == paths[0]
    for which in (11, "nonsense"):
        with pytest.raises(CheckpointError, match=f"{paths[0].name}, {paths[1].name}"):
            checkpointer.restore(which)


def test_nothing_there(checkpointer):
    assert checkpointer.latest() is None and checkpointer.checkpoints() == []
    with pytest.raises(CheckpointError, match=r"^There is no checkpoint in [^ ]*\.$"):
        checkpointer.restore()
    checkpointer.save(1, {})
    with pytest.raises(CheckpointError, match="no checkpoint 'previous' in"):
        checkpointer.restore("previous")


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"x")


def edit_manifest(path, **changes):
    manifest = json.loads(path.read_text())
    manifest = {name: value for name, value in {**manifest, **changes}.items() if value is not ...}
    path.write_text(json.dumps(manifest))
    (path.parent / "DONE").write_text(hashlib.sha256(path.read_bytes()).hexdigest())


def write_manifest(path, text):
    (path / "manifest.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    (path / "DONE").write_text(hashlib.sha256((path / "manifest.json").read_bytes()).hexdigest())


DAMAGE = {
    "truncated": (lambda c: cut(c / "learner"), "learner is truncated: it has"),
    "altered": (lambda c: flip(c / "learner"), "learner has been altered"),
    "longer": (lambda c: lengthen(c / "note"), "note is longer than written: it has 4 bytes, expected 3"),
    "missing": (lambda c: (c / "replay/tables/rows.bin").unlink(), "replay/tables/rows.bin is missing"),
    "manifest cut": (lambda c: cut(c / "manifest.json"), "manifest.json has been altered or truncated"),
    "manifest altered": (lambda c: flip(c / "manifest.json"), "manifest.json has been altered"),
    "manifest missing": (lambda c: (c / "manifest.json").unlink(), "it has no manifest.json"),
    "digest altered": (lambda c: flip(c / "DONE"), "manifest.json has been altered"),
    "newer format": (lambda c: edit_manifest(c / "manifest.json", format=99), "got format 99, expected"),
    "oldest format": (lambda c: edit_manifest(c / "manifest.json", format=...), "got format 1, expected"),
    **{
        f"{name}: {value!r}": (
            lambda c, name=name, value=value: edit_manifest(c / "manifest.json", **{name: value}),
            rf"is damaged: manifest.json: {name}: got .*, expected .*\. It was not loaded; take another",
        )
        for name, values in {
            "parts": (..., None, {"learner": 1}, [1], ["../learner"]),
            "files": (..., [], {"learner": 3}, {"learner": ["1", 2]}),
            "step": ("7", 1.5),
            "note": (3, None),
        }.items()
        for value in values
    },
    "manifest no JSON": (lambda c: write_manifest(c, "{"), "manifest.json is not JSON"),
    "manifest of bytes": (lambda c: write_manifest(c, b"\xff"), "manifest.json is not JSON"),
    "manifest nested": (lambda c: write_manifest(c, "[" * 100_000), "manifest.json is not JSON"),
    "manifest a list": (lambda c: write_manifest(c, "[1]"), "manifest.json: got list, expected a mapping"),
    "points outside": (lambda c: edit_manifest(c / "manifest.json", files={"../x": [0, 0]}), "outside of it"),
}


@pytest.mark.parametrize("damage, text", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused_with_the_reason(checkpointer, damage, text):
    checkpointer.save(1, parts(1))
    path = checkpointer.save(2, parts(2))
    damage(path)
    with pytest.raises(CheckpointError, match=text) as caught:
        checkpointer.restore()
    assert path.name in str(caught.value) and "ask for 'previous'" in str(caught.value)
    assert checkpointer.restore("previous").state("learner")["w"][0] == 1
    with pytest.warns(UserWarning, match=text):
        assert checkpointer.newest_intact().step == 1


def test_damage_is_refused_in_a_folder_of_another_run(checkpointer, tmp_path):
    path = checkpointer.save(1, parts())
    cut(path / "note")
    with pytest.raises(CheckpointError, match="note is truncated"):
        Checkpointer(tmp_path / "empty").restore(path)


def test_all_damaged(checkpointer):
    for step in (1, 2):
        cut(checkpointer.save(step, parts()) / "note")
    with pytest.raises(CheckpointError, match=r"No checkpoint .* is intact"):
        checkpointer.newest_intact()


def test_only_what_was_written_is_deleted(checkpointer):
    path = checkpointer.save(0, parts())
    (path / "my_notes.txt").write_text("keep")
    (checkpointer.directory / "checkpoint-000000-step-9").mkdir()
    (checkpointer.directory / "other").mkdir()
    for step in range(1, 4):
        checkpointer.save(step, parts())
    assert os.listdir(path) == ["my_notes.txt"]
    assert (checkpointer.directory / "checkpoint-000000-step-9").is_dir()
    assert (checkpointer.directory / "other").is_dir()
    assert [open_checkpoint(p).step for p in checkpointer.checkpoints()] == [1, 2, 3]


def test_a_manifest_cannot_make_it_delete_elsewhere(checkpointer, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = checkpointer.save(0, parts())
    edit_manifest(path / "manifest.json", files={"../../victim": [8, 0]})
    with pytest.warns(UserWarning, match="Could not delete"):
        for step in range(1, 4):
            checkpointer.save(step, parts())
    assert victim.read_text() == "precious"


def fail_with(code, name=None):
    def write(path):
        path.write_bytes(b"half")
        raise OSError(code, os.strerror(code), name)

    return write


FULL = {
    "disk": (errno.ENOSPC, "no space is left.* Free some space there, or"),
    "quota": (errno.EDQUOT, "quota.* Free some space there, or"),
    "permission": (errno.EACCES, "permission is denied.* Make that place writable, or"),
    "other": (errno.EIO, "[Ii]nput/output error.* Make that place writable, or"),
}


@pytest.mark.parametrize("code, text", FULL.values(), ids=FULL)
def test_full_disk(checkpointer, code, text):
    before = checkpointer.save(1, parts(1))
    with pytest.raises(CheckpointError, match=text) as caught:
        checkpointer.save(2, {"learner": torch_part({"w": torch.ones(2)}), "replay": fail_with(code)})
    assert "--directory" in str(caught.value) and before.name in str(caught.value)
    with pytest.raises(CheckpointError, match=text.removesuffix(", or") + r"\.$"):
        checkpointer.save(2, {"far": fail_with(code, "/elsewhere/x")})
    assert os.listdir(checkpointer.directory) == [before.name]
    assert checkpointer.restore().state("learner")["w"][0] == 1


def test_torch_write_that_hits_a_limit(checkpointer):
    before = checkpointer.save(1, parts(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(CheckpointError, match="size limit"):
            checkpointer.save(2, {"learner": torch_part({"w": torch.ones(1 << 16)})})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(checkpointer.directory) == [before.name]


@pytest.mark.parametrize("kind", [RuntimeError, TimeoutError])
def test_an_error_of_a_part_leaves_nothing(checkpointer, kind):
    before = checkpointer.save(1, parts())

    def fail(path):
        path.mkdir()
        raise kind("replay is gone")

    with pytest.raises(kind, match="replay is gone"):
        checkpointer.save(2, {"replay": fail})
    with pytest.raises(CheckpointError, match="'replay' made neither a file nor a folder"):
        checkpointer.save(2, {"replay": lambda path: None})
    assert os.listdir(checkpointer.directory) == [before.name]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden", "manifest.json"])
def test_part_names(checkpointer, name):
    with pytest.raises(ValueError, match="part name"):
        checkpointer.save(1, {name: b""})


def test_killed_while_writing(checkpointer):
    checkpointer.save(1, parts(1))
    script = (
        "import os, sys\n"
        "from framework.checkpoints import Checkpointer\n"
        "Checkpointer(sys.argv[1]).save(2, {'a': b'x', 'b': lambda path: os._exit(9)})\n"
    )
    done = warm_python.run(["-c", script, checkpointer.directory], timeout=60)
    assert done.returncode == 9
    assert any(name.startswith(".writing-") for name in os.listdir(checkpointer.directory))
    assert checkpointer.restore().step == 1
    checkpointer.save(3, parts(3))
    assert not unfinished(checkpointer)


def test_another_process_removes_no_checkpoint_that_has_just_begun(checkpointer, monkeypatch):
    lock, other = fcntl.flock, Checkpointer(checkpointer.directory)

    def lock_late(*arguments):
        monkeypatch.undo()
        other._remove_unfinished()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    path = checkpointer.save(1, parts())
    assert os.listdir(checkpointer.directory) == [path.name]


def test_what_a_killed_process_left_of_an_old_checkpoint_is_deleted_later(
    checkpointer, tmp_path, monkeypatch
):
    delete, left, kept = pathlib.Path.unlink, [0], Checkpointer(checkpointer.directory, keep=1)

    def unlink(path, **options):
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        delete(path, **options)

    monkeypatch.setattr(pathlib.Path, "unlink", unlink)
    for deleted in range(11):
        inner = Checkpointer(tmp_path / "inner").save(None, parts())
        kept.save(1, {"replay": functools.partial(shutil.move, inner), "note": b"abc"})
        for left[0] in (deleted, 99):
            with contextlib.suppress(KeyboardInterrupt):
                kept.save(2, {})
        assert os.listdir(kept.directory) == [kept.latest().name]


def test_two_checkpointers_of_one_process_leave_each_other_s_work(checkpointer):
    other = Checkpointer(checkpointer.directory)

    def save_between(path):
        path.write_bytes(b"x")
        other.save(7, {"a": b"x"})

    checkpointer.save(5, {"b": save_between, "c": b"x"})
    names = {path.name for path in checkpointer.checkpoints()}
    assert names == {"checkpoint-000001-step-5", "checkpoint-000001-step-7"}


STATES = {
    "nested": {"a": [1, 2.5, None, True, "x", b"y"], "b": {"c": (1, (2, [3]))}, 3: "key", ("a", 1): "key"},
    "generator": np.random.default_rng(3).bit_generator.state,
    "legacy generator": {"bg": np.random.RandomState(1).get_state(legacy=False)},
    "scalars": {"f": np.float32(0.5), "i": np.int64(-3), "u": np.uint64(2**64 - 1), "b": np.bool_(True)},
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
}


@pytest.mark.parametrize("state", STATES.values(), ids=STATES)
def test_states_come_back_equal(checkpointer, state):
    checkpointer.save(1, {"state": torch_part(state)})
    back = checkpointer.restore().state("state")
    np.testing.assert_equal(back, state)
    assert type(back) is type(state)


@pytest.mark.parametrize(
    "dtype", ["bool", "uint8", "int16", "uint16", "int64", "uint64", "float16", "float64"]
)
def test_arrays_come_back_exactly(checkpointer, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    checkpointer.save(1, {"state": torch_part({"x": array, "empty": array[:0], "scalar": array[0, 1]})})
    back = checkpointer.restore().state("state")
    for name, expected in {"x": array, "empty": array[:0], "scalar": array[0, 1]}.items():
        assert back[name].dtype == expected.dtype and back[name].shape == expected.shape
        assert type(back[name]) is type(expected)
        np.testing.assert_array_equal(back[name], expected)


Pair = namedtuple("Pair", "a b")
Color = enum.IntEnum("Color", "RED")
REFUSED = {
    "function": ({"a": [1, print]}, r"state\['a'\]\[1\]: got a builtin_function"),
    "named tuple": ({"p": Pair(1, 2)}, r"state\['p'\]: got a Pair"),
    "enum": ({"color": Color.RED}, r"state\['color'\]: got a Color"),
    "key": ({(1, Color.RED): 2}, r"state: got the key \(1, <Color.RED: 1>\), expected a string or number"),
    "numpy key": ({np.float64(1.5): 2}, r"state: got the key .*1\.5"),
    "object array": ({"o": np.array([object()])}, r"state\['o'\]: got dtype object"),
    "byte order": ({"x": np.zeros(2, ">f4")}, r"state\['x'\]: got dtype >f4"),
}


@pytest.mark.parametrize("state, text", REFUSED.values(), ids=REFUSED)
def test_what_is_no_data_is_refused_when_saved(checkpointer, state, text):
    with pytest.raises(TypeError, match=text):
        checkpointer.save(1, {"state": torch_part(state)})
    assert checkpointer.checkpoints() == []


def test_a_part_that_would_run_code_is_refused(checkpointer, tmp_path):
    flag = tmp_path / "ran"

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(flag),))

    checkpointer.save(1, {"evil": lambda path: torch.save(Evil(), path)})
    with pytest.raises(CheckpointError, match=r"is damaged: its part 'evil' .*[Ww]eights.only"):
        checkpointer.restore().state("evil")
    assert not flag.exists()


def test_a_part_that_is_no_state_or_lacks_an_entry_is_named(checkpointer):
    checkpointer.save(1, {"text": b"abc", "state": torch_part({"a": [1]}), "list": torch_part([1])})
    reader = checkpointer.restore()
    (reader.path / "text").unlink()
    for part, *entries in (("text",), ("state", "b"), ("state", "a", "c"), ("list", "a")):
        with pytest.raises(CheckpointError, match=rf"damaged: its part {part!r} .*; take another one"):
            reader.state(part, *entries)
    assert reader.state("state", "a") == [1]


def test_saves_at_the_same_time_get_numbers_of_their_own(tmp_path):
    saver = Checkpointer(tmp_path, keep=10)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda step: saver.save(step, {"part": [bytes(1 << 20)]}), range(8)))
    assert len(set(found)) == 8
    assert sorted(found) == saver.checkpoints()
    for path in found:
        saver.restore(path)
