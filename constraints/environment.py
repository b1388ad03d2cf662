"""Makes a virtual environment with the tested versions and this checkout in it.

    python constraints/environment.py FOLDER [--extras test docs] [--python PYTHON]
    python constraints/environment.py FOLDER --requirements constraints/ray.txt [--no-deps] …

Installing the packages takes minutes, so they are installed once for all checkouts of a user: into a folder
of the cache (`$XDG_CACHE_HOME/repertory`, or `~/.cache/repertory`) that is named by a hash of `setup.py`, the
constraints, and the Python. A new FOLDER consists of hard links to the files there (copies, if it lies on
another file system) and of this checkout. A FOLDER that exists keeps what it has, and gets what it lacks; it
is made anew if it is one of another Python.

The cache keeps what was used within the last 30 days, and can be removed at any time.
"""

import argparse
import fcntl
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "repertory"
KEPT_S = 30 * 24 * 3600.0
COMPLETE = "complete"  # The file that is written last.
_ABOUT = "import platform, sys; print('%d.%d.%d' % sys.version_info[:3], platform.machine(), sys.platform)"


def describe(python):
    """The version and the platform of an interpreter; None if there is none."""
    try:
        return subprocess.run([python, "-c", _ABOUT], stdout=subprocess.PIPE, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return None


def pip(folder, checkout, *arguments):
    command = [folder / "bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", "install"]
    subprocess.run([*command, *arguments], cwd=checkout, check=True)


def packages(options, version):
    """The arguments of pip that install everything but this checkout, and the file of their versions."""
    if options.requirements:
        return ["-r", options.requirements, *(["--no-deps"] if options.no_deps else [])], options.requirements
    constraints = "constraints/py{}{}.txt".format(*version.split("."))
    extras = "[{}]".format(",".join(options.extras)) if options.extras else ""
    if not (options.checkout / constraints).exists():
        print(f"No tested versions for Python {version}: installing the newest of everything.")
        return ["-e", "." + extras], None
    return ["-c", constraints, "-e", "." + extras], constraints


def cached(options, about):
    """The folder of the cache with the packages, which are installed if it is new."""
    what, versions = packages(options, about.split()[0])
    digest = hashlib.sha256("\n".join([*what, about]).encode())
    for name in ("setup.py", *([versions] if versions else [])):
        digest.update((options.checkout / name).read_bytes())
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / "py{}{}-{}".format(*about.split(".")[:2], digest.hexdigest()[:16])
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            begin = time.monotonic()
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([options.python, "-m", "venv", folder], check=True)
            pip(folder, options.checkout, *what)
            uninstall = [folder / "bin/python", "-m", "pip", "uninstall", "--quiet", "--yes", "repertory"]
            subprocess.run(uninstall, check=True)
            print(f"{folder.name}: installed in {time.monotonic() - begin:.0f} s", flush=True)
        (folder / COMPLETE).touch()
    return folder


def remove_old():
    for marker in CACHE.glob("*/" + COMPLETE):
        if time.time() - marker.stat().st_mtime > KEPT_S:
            shutil.rmtree(marker.parent, ignore_errors=True)


def link(source, target):
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def copy(source, folder):
    """Makes a copy of the environment `source` whose scripts name `folder`."""
    shutil.copytree(source, folder, symlinks=True, copy_function=link)
    (folder / COMPLETE).unlink()
    for script in (folder / "bin").iterdir():
        content = script.read_bytes()
        if not script.is_symlink() and b"\0" not in content and bytes(source) in content:
            mode = script.stat().st_mode
            script.unlink()  # The file in the cache stays as it is.
            script.write_bytes(content.replace(bytes(source), bytes(folder)))
            script.chmod(mode)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", help="of the environment")
    parser.add_argument("--python", default=sys.executable, help="the interpreter; this one by default")
    parser.add_argument("--extras", nargs="+", default=[], help="extras of setup.py")
    parser.add_argument("--requirements", help="a file to install in place of what setup.py asks for")
    parser.add_argument("--no-deps", action="store_true", help="the file of requirements is complete")
    parser.add_argument("--checkout", type=pathlib.Path, default=ROOT, help="another one than this")
    parser.add_argument("--alone", action="store_true", help="without this checkout")
    options = parser.parse_args()
    folder = pathlib.Path(options.folder).absolute()
    about = describe(options.python)
    if about is None:
        sys.exit(f"--python: got {options.python}, which does not run.")
    if describe(folder / "bin/python") == about:
        pip(folder, options.checkout, *packages(options, about.split()[0])[0])
    else:
        if folder.exists():
            if not (folder / "pyvenv.cfg").exists():
                sys.exit(f"FOLDER: got {folder}, which is there and is no environment.")
            shutil.rmtree(folder)
        copy(cached(options, about), folder)
        remove_old()
    if not options.alone:
        # Its dependencies are there; a dependency that is only a name in setup.py would be asked for again.
        pip(folder, options.checkout, "--no-deps", "-e", ".")


if __name__ == "__main__":
    main()
