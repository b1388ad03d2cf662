"""The folder in shared memory that nodes of one machine have on Ray."""

import os

from launch.rpc import sockets


def test_a_shared_directory_lives_as_long_as_one_of_its_processes(tmp_path):
    path = str(tmp_path / "lp-job")
    first, second = sockets.share_directory(path), sockets.share_directory(path)
    (tmp_path / "lp-job" / "file").touch()
    assert os.stat(path).st_mode & 0o777 == 0o700
    assert sockets.remove_abandoned_directories(str(tmp_path), "lp-") == []
    os.close(first)
    assert sockets.remove_abandoned_directories(str(tmp_path), "lp-") == []
    os.close(second)
    assert sockets.remove_abandoned_directories(str(tmp_path), "lp-") == [path]
    os.close(sockets.share_directory(path))  # A later node makes it again.
    assert os.path.isdir(path)
