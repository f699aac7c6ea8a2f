"""From a reference such as ``examples/digits.py`` to the ``Job`` it stands for.

The launcher loads the job before it forks, so that what the file imports (transformers takes seconds) is paid for once;
workers then find the module loaded and only call its function again.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from urllib.parse import parse_qsl, urlencode

from phalanx.config import Job
from phalanx.config.params import DeclaredParam, ParamOverrides, overriding
from phalanx.device_kinds import all_kinds
from phalanx.errors import PhalanxError, SpecError

_TAIL = 12  # lines of a user's traceback that an error shows
_stamps: dict[str, tuple[int, int]] = {}
_declared_by: dict[str, dict[str, DeclaredParam]] = {}  # by the name of a module: what its import declared
_values_of: dict[str, tuple[DeclaredParam, ...]] = {}
_SET = re.compile(r"\?([^\W\d]\w*=.*)$")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Where a job is.

    Attributes:
        file: the Python file, absolute; ``None`` where a module is named.
        module: the module's dotted name, empty where a file is named.
        function: the function in it that returns the job.
        values: what overrides the values that it declares, as texts, sorted by name.
    """

    file: Path | None
    module: str
    function: str
    values: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Reference:
        """``path/to/file.py``, ``path/to/file.py:name``, ``package.module`` or ``package.module:name``.

        Values that override the job's own may follow: ``file.py?lr=0.001&width=64``.
        """
        text, given = _split_values(text)
        values = tuple(sorted(given.items()))
        where, _, function = text.partition(":") if ".py" not in text else _split_file(text)
        if where.endswith(".py") or "/" in where:
            return cls(file=Path(where).expanduser().resolve(), module="", function=function or "job", values=values)
        return cls(file=None, module=where, function=function or "job", values=values)

    def __str__(self) -> str:
        where = str(self.file) if self.file else self.module
        named = where if self.function == "job" else f"{where}:{self.function}"
        return with_values(named, dict(self.values))

    @property
    def is_name(self) -> bool:
        """Whether it is a word alone, as a job is called in Python that no file was named for."""
        return self.file is None and "." not in self.module and self.function == "job"

    @property
    def stem(self) -> str:
        """The name of the file or of the module's last part, and of the function where it is not ``job``."""
        stem = self.file.stem if self.file else self.module.rpartition(".")[2]
        return stem if self.function == "job" else f"{stem}-{self.function}"


def with_values(reference: str, values: Mapping[str, str]) -> str:
    """``reference`` with values that override those the job declares; they replace those of the same names in it."""
    base, before = _split_values(reference)
    merged = {**before, **values}
    return f"{base}?{urlencode(sorted(merged.items()))}" if merged else base


def going_on(reference: str, earlier: str) -> str:
    """``reference`` with the values of the ``earlier`` run of the same job, where it gives none of its own."""
    here, before = Reference.parse(reference), Reference.parse(earlier)
    same = dataclasses.replace(before, values=()) == dataclasses.replace(here, values=())
    return with_values(reference, dict(before.values)) if same and not here.values else reference


def declared_values(reference: str) -> tuple[DeclaredParam, ...]:
    """What the job declared when ``load_job`` last loaded it by this reference."""
    return _values_of.get(reference, ())


def load_job(reference: str) -> Job:
    """The job that ``path/to/file.py``, ``path/to/file.py:name`` or ``package.module:name`` stands for.

    A job that was given no name gets the file's, and the function's where that is not ``job``.

    Raises:
        SpecError: there is no such file or function, the file fails, or what the function returns is no ``Job``. A
            SpecError of the job itself passes through unchanged.
    """
    where, asked, reference = Reference.parse(reference), reference, with_no_values(reference)
    overrides = ParamOverrides(given=dict(where.values), texts=True)
    with _left_alone(), overriding(overrides):
        module = _loaded(where, reference, overrides)
        function = _find(module, where, reference)
        call = f"{where.function}()"
        with _explained(f"{call} in {reference}", module.__file__, reference, then=call):
            job = function()
    _values_of[asked] = tuple(overrides.declared.values())
    if not isinstance(job, Job):
        given = f"a result of type {type(job).__name__}" if job is not None else "no result (None)"
        fix = f"def {call} -> px.Job: return px.Job(model=..., data=..., loss=..., optimizer=..., batch=256, epochs=5)"
        raise SpecError.of(f"{call} in {reference}", given, "a phalanx.Job", fix)
    return dataclasses.replace(job, name=where.stem) if job.name == "job" else job


def with_no_values(reference: str) -> str:
    """``reference`` without the values that override those the job declares."""
    return _split_values(reference)[0]


def _split_values(reference: str) -> tuple[str, dict[str, str]]:
    found = _SET.search(reference)
    return (reference[: found.start()], dict(parse_qsl(found[1], keep_blank_values=True))) if found else (reference, {})


def _loaded(where: Reference, reference: str, overrides: ParamOverrides) -> ModuleType:
    """Return the module of a job, imported with the overrides that it reads at its top level."""
    key = str(where.file or where.module)
    declared = _declared_by.get(key, {})
    again = any(overrides.value(one.name, one.default) != one.value for one in declared.values())
    module = _import(where, reference, again=again)
    if overrides.declared or again:
        _declared_by[key] = dict(overrides.declared)  # it was imported now
    else:
        overrides.declared.update(declared)
    return module


def _import(where: Reference, reference: str, *, again: bool = False) -> ModuleType:
    if where.file:
        return _import_file(where.file, reference, again=again)
    module = _import_module(where.module, reference)
    with _explained(reference, None, reference):
        return importlib.reload(module) if again else module


def load_function(reference: str) -> Callable[..., object]:
    """The function that ``path/to/file.py:name`` or ``package.module:name`` stands for, not called.

    Raises:
        SpecError: there is no such file or function, none is named, or the file fails.
    """
    where = Reference.parse(reference)
    if not reference.endswith(f":{where.function}"):
        where, reference = dataclasses.replace(where, function="loop"), f"{reference}:loop"
    with _left_alone():
        module = _import(where, reference)
        return _find(module, where, reference, _A_LOOP, f"{reference.removesuffix(where.function)}{_loop_in(module)}")


_A_LOOP = "a function: a training loop of your own"


def _loop_in(module: ModuleType) -> str:
    """The function of a module whose name is most like that of a training loop."""
    names = [name for name in _functions(module) if name != "job"]
    return next(iter(difflib.get_close_matches("loop", names, n=1, cutoff=0.0)), "loop")


def _functions(module: ModuleType) -> list[str]:
    """Names of what can be called in a module and is its own."""
    own = ((name, value) for name, value in vars(module).items() if not name.startswith("_"))
    return sorted(
        name for name, value in own if callable(value) and getattr(value, "__module__", "") == module.__name__
    )


def _split_file(text: str) -> tuple[str, str, str]:
    # the last colon, and only behind ".py": folders may hold colons
    head, colon, tail = text.rpartition(":")
    return (head, colon, tail) if head.endswith(".py") else (text, "", "")


@contextmanager
def _left_alone() -> Iterator[None]:
    """Let a job file ask if there is an accelerator without using one, and keep our own options from it.

    A process that uses an accelerator could not fork workers that do.
    """
    wanted = {name: value for kind in all_kinds() for name, value in kind.asks_lightly().items()}
    before, argv = {name: os.environ.get(name) for name in wanted}, sys.argv
    os.environ.update(wanted)
    sys.argv = argv[:1]
    try:
        yield
    finally:
        sys.argv = argv
        for name, value in before.items():
            os.environ.pop(name, None)
            os.environ.update({name: value} if value is not None else {})


@contextmanager
def _explained(what: str, file: str | None, reference: str, *, then: str = "") -> Iterator[None]:
    """Turn whatever user code raises into a SpecError that shows the end of its traceback.

    ``then`` is what is called of it once it is loaded.
    """
    try:
        yield
    except PhalanxError:
        raise
    except (Exception, SystemExit) as error:
        run_it = f"python {file}" if file else f"python -c 'import {reference.partition(':')[0]}'"
        fix = _fix(error) or (f"python -i {file}, and there {then}" if file and then else run_it)
        raise SpecError.of(what, f"an error\n{_tail(error, file)}", "code that runs without one", fix) from error


def _fix(error: BaseException) -> str:
    """What would mend the user's code, where that can be told from the error."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.partition(".")[0]
        if missing in ("tensorflow", "jax"):
            return 'os.environ["KERAS_BACKEND"] = "torch" before keras is imported, or KERAS_BACKEND=torch in the shell'
        return "pip install 'phalanx[transformers]'" if missing == "transformers" else f"pip install {missing}"
    line = traceback.extract_tb(error.__traceback__)[-1].line or ""
    if "sys.argv" in line or (isinstance(error, SystemExit) and error.code == 2):  # the second is argparse's
        return 'px.param("lr", 0.1) in the file and phalanx train FILE --set lr=0.5'
    unknown = re.match(r"Job\.__init__\(\) got an unexpected keyword argument '(\w+)'", str(error))
    if isinstance(error, TypeError) and unknown:
        names = [field.name for field in dataclasses.fields(Job)]
        (near,) = difflib.get_close_matches(unknown[1], names, n=1, cutoff=0.0)
        return f"{near}= in px.Job, whose fields are {', '.join(names)}"
    return ""


def _tail(error: BaseException, file: str | None) -> str:
    """The end of a traceback, from the user's own file on."""
    trace = error.__traceback__
    while trace and trace.tb_next and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    own = trace is not None and trace.tb_frame.f_code.co_filename == file
    lines = "".join(traceback.format_exception(type(error), error, trace if own else None, chain=False)).splitlines()
    kept = lines if len(lines) <= _TAIL else ["...", *lines[-_TAIL:]]
    return "\n".join(f"    | {line}" for line in kept)


def _import_file(file: Path, reference: str, *, again: bool) -> ModuleType:
    if not file.is_file():
        raise _no_such_file(file, reference)
    stat = file.stat()
    stamp = (stat.st_mtime_ns, stat.st_size)
    name = _module_name(file)
    loaded = sys.modules.get(name)
    if loaded is not None and _stamps.get(name) == stamp and not again:
        return loaded

    # as Python does for a script; it stays, for what model() and data() import later
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # before it runs, as import does: dataclasses and pickle look themselves up there
    try:
        with _explained(reference, str(file), reference):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    _stamps[name] = stamp
    return module


def _module_name(file: Path) -> str:
    """The name by which a process that has the folder on its path would import the file, if that is free."""
    taken = sys.modules.get(file.stem)
    if file.stem.isidentifier() and (taken is None or getattr(taken, "__file__", None) == str(file)):
        return file.stem
    return f"phalanx_job_{hashlib.sha256(str(file).encode()).hexdigest()[:8]}"


def _no_such_file(file: Path, reference: str) -> SpecError:
    folder = file if file.is_dir() else file.parent
    here = sorted(path.name for path in folder.glob("*.py")) if folder.is_dir() else []
    what = "is a folder" if file.is_dir() else "is no file" if file.exists() else "does not exist"
    near = difflib.get_close_matches(file.name, here, n=1, cutoff=0.4) or here[:1]
    path = folder / near[0] if near else Path("examples/digits.py")
    fix = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    allowed = "a Python file with a function job()" + (f"; there are: {', '.join(here[:8])}" if here else "")
    return SpecError.of("job", f"{reference}, which {what}", allowed, fix)


def _import_module(name: str, reference: str) -> ModuleType:
    # as ``python -m`` does
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        exists = bool(name) and importlib.util.find_spec(name) is not None
    except (ModuleNotFoundError, ValueError):
        exists = False
    if not exists:
        given = f"{reference!r}, and there is no module {name!r} here"
        allowed = "path/to/file.py, path/to/file.py:name or package.module:name"
        raise SpecError.of("job", given, allowed, "examples/digits.py")
    with _explained(reference, None, reference):
        return importlib.import_module(name)


_A_JOB = "a function without arguments that returns a phalanx.Job"


def _find(
    module: ModuleType, where: Reference, reference: str, meant: str = _A_JOB, fix: str = ""
) -> Callable[..., object]:
    function = getattr(module, where.function, None)
    define = fix or f"def {where.function}() -> px.Job: return px.Job(...)"
    if function is None:
        names = _functions(module)
        base = reference.removesuffix(f":{where.function}")
        near = difflib.get_close_matches(where.function, names, n=1, cutoff=0.4)
        given = f"no function {where.function}() in it" + (f"; it has: {', '.join(names)}" if names else "")
        raise SpecError.of(reference, given, meant, f"{base}:{near[0]}" if near else define)
    if not callable(function):
        what = "a Job" if isinstance(function, Job) else f"of type {type(function).__name__}"
        raise SpecError.of(reference, f"{where.function} is {what}, not a function", meant, define)
    return function
