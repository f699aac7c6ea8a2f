"""Files that may be a stranger's: opening, reading and replacing them safely, and the one writer of a run folder."""

from phalanx.files.documents import json_value, read_json, read_toml, toml_table
from phalanx.files.plain_files import make_folder, open_plain, read_text, refuse_links, replace_file, replace_text
from phalanx.files.single_writer import (
    Token,
    Writer,
    check_writer,
    is_written,
    join,
    refuse_taken,
    release,
    take,
    token_of,
    writer_of,
)

__all__ = [
    "Token",
    "Writer",
    "check_writer",
    "is_written",
    "join",
    "json_value",
    "make_folder",
    "open_plain",
    "read_json",
    "read_text",
    "read_toml",
    "refuse_links",
    "refuse_taken",
    "release",
    "replace_file",
    "replace_text",
    "take",
    "token_of",
    "toml_table",
    "writer_of",
]
