"""Makes a virtual environment with the tested versions and this checkout in it.

    python constraints/environment.py FOLDER [--extras test docs] [--python PYTHON]
    python constraints/environment.py FOLDER --requirements constraints/ray.txt [--no-deps] …

Installing the packages takes minutes, so they are installed once for all checkouts of a user: into a folder
of the cache (`~/.cache/repertory/environments`, or below `$XDG_CACHE_HOME`) that is named by a hash of what
`setup.py` asks for, the constraints, and the Python. A new FOLDER consists of hard links to the files there
(copies, if it lies on another file system) and of this checkout. A FOLDER that exists keeps what it has, and
gets what it lacks; it is made anew if it is one of another Python.

The cache keeps what was used within the last 30 days, and can be removed at any time.
"""

import argparse
import collections
import fcntl
import hashlib
import os
import pathlib
import runpy
import shutil
import subprocess
import sys
import threading
import time
import types
import unittest.mock

ROOT = pathlib.Path(__file__).resolve().parents[1]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "repertory/environments"
KEPT_S = 30 * 24 * 3600.0
LINE_S = 10.0  # Seconds between two lines about an installation.
COMPLETE = "complete"  # The file that is written last.
_ABOUT = "import platform, sys; print('%d.%d.%d' % sys.version_info[:3], platform.machine(), sys.platform)"


def describe(python):
    """The version and the platform of an interpreter; None if there is none."""
    try:
        return subprocess.run([python, "-c", _ABOUT], stdout=subprocess.PIPE, check=True).stdout.decode()
    except (OSError, subprocess.CalledProcessError):
        return None


def say(text):
    print(text, flush=True)


def pip(folder, checkout, *arguments):
    """Runs `pip install`, and says every ten seconds what it does."""
    command = [folder / "bin/python", "-m", "pip", "--disable-pip-version-check", "install"]
    begin, lines = time.monotonic(), collections.deque(["starting pip"], maxlen=1)
    process = subprocess.Popen(
        [*command, "--progress-bar", "off", *arguments],
        cwd=checkout,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    reader = threading.Thread(target=lines.extend, args=(process.stdout,), daemon=True)
    reader.start()
    while True:
        reader.join(LINE_S)
        if not reader.is_alive():
            break
        say(f"{time.monotonic() - begin:5.0f} s  {lines[-1].strip()[:100]}")
    if process.wait():
        sys.exit(f"pip install failed: {lines[-1].strip()}")


def requirements(checkout, extras):
    """What `setup.py` asks for."""
    given = {}
    setuptools = types.ModuleType("setuptools")
    setuptools.setup, setuptools.find_packages = lambda **options: given.update(options), lambda **options: []
    with unittest.mock.patch.dict(sys.modules, setuptools=setuptools):
        runpy.run_path(str(checkout / "setup.py"))
    return [*given["install_requires"], *(each for name in extras for each in given["extras_require"][name])]


def packages(options, version):
    """The arguments of pip that install everything but the checkout, and the file of their versions."""
    if options.requirements:
        return ["-r", options.requirements, *(["--no-deps"] if options.no_deps else [])], options.requirements
    constraints = "constraints/py{}{}.txt".format(*version.split("."))
    asked = requirements(options.checkout, options.extras)
    if not (options.checkout / constraints).exists():
        say(f"No tested versions for Python {version}: installing the newest of everything.")
        return asked, None
    return ["-c", constraints, *asked], constraints


def named(what):
    """What the arguments of pip ask for, in words."""
    if what[0] == "-r":
        return f"the packages of {what[1]}"
    return f"{len(what) - 2 * (what[0] == '-c')} packages, such as torch, and what they need"


def cached(options, about):
    """The folder of the cache with the packages, which are installed if it is new."""
    what, versions = packages(options, about.split()[0])
    digest = hashlib.sha256("\n".join([*what, about]).encode())
    if versions:
        digest.update((options.checkout / versions).read_bytes())
    CACHE.mkdir(parents=True, exist_ok=True)
    folder = CACHE / "py{}{}-{}".format(*about.split(".")[:2], digest.hexdigest()[:16])
    with open(f"{folder}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"Waiting for another installation into {folder}.")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / COMPLETE).exists():
            begin, version = time.monotonic(), about.split()[0]
            say(f"Installing {named(what)} for Python {version} into {folder}: a few minutes, once per user.")
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([options.python, "-m", "venv", folder], check=True)
            pip(folder, options.checkout, *what)
            say(f"{folder.name}: installed in {time.monotonic() - begin:.0f} s")
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
        if script.is_symlink() or not script.is_file():
            continue
        content = script.read_bytes()
        if b"\0" not in content and bytes(source) in content:
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
        say(f"{folder}: adding what it lacks")
        pip(folder, options.checkout, *packages(options, about.split()[0])[0])
    else:
        if folder.exists():
            if not (folder / "pyvenv.cfg").exists():
                sys.exit(f"FOLDER: got {folder}, which is there and is no environment.")
            shutil.rmtree(folder)
        source, begin = cached(options, about), time.monotonic()
        copy(source, folder)
        remove_old()
        say(f"{folder}: made of {source} in {time.monotonic() - begin:.0f} s")
    if not options.alone:
        pip(folder, options.checkout, "--no-deps", "-e", ".")


if __name__ == "__main__":
    main()
