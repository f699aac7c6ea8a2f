"""What a Hugging Face ``config.json`` asks for in each step: no code of the model is needed."""

from __future__ import annotations

from pathlib import Path

from phalanx.errors import Problem, SpecError
from phalanx.forecast import Work


def is_config(what: str) -> bool:
    """Whether ``what`` is the path of a ``config.json``, or of a folder that holds one."""
    path = Path(what)
    return path.suffix == ".json" or (path / "config.json").is_file()


def config_work(path: str, *, batch: int, length: int = 0) -> Work:
    """The work of training the model of a configuration with AdamW.

    Args:
        path: of a ``config.json``, or of the folder that holds it.
        batch: samples in one step of all devices.
        length: tokens in a sample; 0 for what the model was made for, at most 4096.

    Raises:
        SpecError: if ``batch`` is 0, or the file cannot be read, or is of an unknown architecture.
    """
    if not batch:
        allowed = "samples in one step of all devices: a configuration does not say"
        raise SpecError([Problem(where="--batch", given="nothing", allowed=allowed, fix="--batch 1024")])
    from phalanx.profile.config import from_config

    return Work(profile=from_config(path, length=length).profile(), batch=batch, length=length)
