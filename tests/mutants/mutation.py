"""A fault that is put into the code, and what has to find it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src" / "phalanx"
CANNOT_RUN = r"(Name|Local|Import|Module\w+|Syntax|Indentation)Error\b|process group has not been initialized"


@dataclass(frozen=True, slots=True)
class Mutation:
    """One change of one file.

    Attributes:
        fault: in words.
        file: below ``src/phalanx``.
        old: text that is there exactly once.
        new: what stands there instead.
        checks: as in ``checks``; tried in turn until one fails.
    """

    fault: str
    file: str
    old: str
    new: str
    checks: tuple[str, ...]

    @property
    def applies(self) -> bool:
        """Whether the text is there, once."""
        return (SOURCE / self.file).exists() and (SOURCE / self.file).read_text().count(self.old) == 1

    def put_into(self, package: Path) -> None:
        """Change the file in ``package``, a copy; other links to the file keep what it was."""
        path = package / self.file
        text = path.read_text().replace(self.old, self.new)
        path.unlink()
        path.write_text(text)
