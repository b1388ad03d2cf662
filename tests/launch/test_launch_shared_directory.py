"""The folder in shared memory that nodes of one machine have on Ray."""

import os

import pytest

from launch import directories


def test_a_shared_directory_lives_as_long_as_one_of_its_processes(tmp_path):
    path = str(tmp_path / "lp-job")
    first, second = directories.share_directory(path), directories.share_directory(path)
    (tmp_path / "lp-job" / "file").touch()
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert directories.remove_abandoned_directories(str(tmp_path), "lp-") == []
    os.close(first)
    assert directories.remove_abandoned_directories(str(tmp_path), "lp-") == []
    os.close(second)
    assert directories.remove_abandoned_directories(str(tmp_path), "lp-") == [path]
    os.close(directories.share_directory(path))  # A later node makes it again.
    assert os.path.isdir(path)


@pytest.mark.parametrize("kind", ["open to others", "a link to nothing", "a file"])
def test_what_others_may_have_made_is_refused(kind, tmp_path):
    path = tmp_path / "lp-job"
    if kind == "open to others":
        path.mkdir(mode=0o700)
        path.chmod(0o777)
    elif kind == "a file":
        path.touch()
    else:
        path.symlink_to(tmp_path / "nothing")
    with pytest.raises(PermissionError, match="expected a directory of mode 0700"):
        directories.share_directory(str(path))
