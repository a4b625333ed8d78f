"""What the system refuses to write is bad input that names the file; other faults stay what they are."""

import errno

import pytest
from headstart.configs.errors import BadInput, writing_into


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "runs/a: cannot be written: No space left on device"),
        (OSError(errno.EROFS, "", "runs/a/b.json"), "runs/a/b.json: cannot be written: Read-only file system"),
        (RuntimeError("I/O error: disk (os error 28)"), "runs/a: cannot be written: No space left on device"),
    ],
)
def test_a_full_disk_is_named(error, line):
    with pytest.raises(BadInput) as caught, writing_into("runs/a"):
        raise error
    assert str(caught.value) == line


def test_a_file_or_folder_without_rights_is_named():
    with pytest.raises(BadInput) as caught, writing_into("runs/a"):
        raise PermissionError(errno.EACCES, "Permission denied", "/root/.cache")
    assert str(caught.value) == "/root/.cache: Permission denied", "whether it was read or written"


@pytest.mark.parametrize("error", [BadInput("x"), KeyError("x"), FileNotFoundError(errno.ENOENT, "no", "x")])
def test_other_faults_stay_what_they_are(error):
    with pytest.raises(type(error)) as caught, writing_into("runs/a"):
        raise error
    assert caught.value is error
