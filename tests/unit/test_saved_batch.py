"""A batch that is kept after an accident is written and read in its own folder, through no link."""

from __future__ import annotations

from pathlib import Path

import pytest

from phalanx.data.saved_batch import SavedBatch
from phalanx.errors import RunError, SpecError
from phalanx.files import release, take

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("linked", ["accidents", "accidents/step-00000000", "accidents/step-00000000/accident.json"])
def test_no_link_is_written_or_read_through(linked: str, tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", Path("run", linked)
    link.parent.mkdir(parents=True)
    victim.write_text("mine") if link.suffix else victim.mkdir()
    saved = SavedBatch(
        folder=Path("run/accidents/step-00000000"), step=0, reason="r", where="w", samples=(1,), rank=0, micro=0, seed=5
    )
    link.symlink_to(victim)
    if link.suffix:
        with pytest.raises(SpecError, match="a symbolic link"):
            SavedBatch.read(saved.folder)
        saved.write({"a": 1})  # in the place of the link
        assert (victim.read_text(), SavedBatch.read(saved.folder)) == ("mine", saved)
        return
    for attempt in (lambda: saved.write({"a": 1}), lambda: SavedBatch.read(saved.folder), lambda: saved.batch):
        with pytest.raises(SpecError, match="a symbolic link"):
            attempt()
    assert list(victim.iterdir()) == []


def test_nothing_is_written_in_a_folder_that_another_run_has_taken(tmp_path: Path) -> None:
    token = take(tmp_path)
    saved = SavedBatch(
        folder=tmp_path / "accidents" / "step-0", step=0, reason="r", where="w", samples=(1,), rank=0, micro=0, seed=5
    )
    (tmp_path / "writer.json").write_text('{"identity": "another"}')
    try:
        with pytest.raises(RunError, match="taken over"):
            saved.write({"a": 1})
        assert not (tmp_path / "accidents").exists()
    finally:
        release(token)
