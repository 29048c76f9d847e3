"""Functions by value: their code, which never changes, apart from the values that they capture.

cloudpickle writes a function whole: its code, and the globals, cells and defaults that it refers
to. That takes hundreds of bytes, and more time than the rest of a small call. But the code of a
function cannot change, and a program sends the same functions again and again. So a function is
*taken apart* here into a ``Code``, which a peer may keep, and the captured values. These may change
at any time, and are sent anew with each call. Nothing about captured values is remembered, so
nothing can be outdated; and each call gets a new function.

A ``Code`` has all parts of a function that are texts, and the names of captured modules:

- the code object, the function's name, qualified name, module and docstring;
- ``__name__``, ``__package__`` and ``__file__`` of the module that it was written in;
- which globals and cells are modules, and their names; the submodules that the code refers to;
- which globals are captured, and how many cells, defaults and annotations there are.

An unusual function (an empty cell, a docstring that is no text, constants that a program has put
into a code object) is left to cloudpickle, which writes it whole.
"""

from __future__ import annotations

import builtins
import dis
import functools
import marshal
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle

from torchweft.errors import ProtocolError, SerializationError
from torchweft.serialize.functions import MAIN_MODULES, is_registered_by_value, load_module
from torchweft.threads.interrupts import is_of_handler

_STABLE_VERSION = 2
"""Format of ``marshal`` in which equal objects have equal bytes, however they came about."""
_KNOWN_LIMIT = 4096
_MOST_KEPT = 512
"""Codes of others that stay loaded, those that were used last."""
_KEPT_BYTES = 32 << 10
"""Longer code is loaded each time that it comes."""
_SHAPES_LIMIT = 4
_MAIN_NAMES = frozenset(MAIN_MODULES)
_GLOBAL_STEPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_MODULE_TEXTS = ("__name__", "__package__", "__file__")
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...), CodeType)
_OWN_TEXTS = ("__name__", "__qualname__", "__module__", "__doc__")
_COMPILER = "torch._dynamo"
_ABSENT = object()
_TEXTS = (str, type(None))


class Layout(NamedTuple):
    """The parts of a ``Code`` beside its code object.

    Attributes:
        texts: Name, qualified name, module and docstring of the function.
        module_texts: ``__name__``, ``__package__`` and ``__file__`` of its globals.
        modules: The globals that are modules: name, and name of the module.
        names: The globals that are captured.
        cells: For each cell the name of the module in it; None for a captured value.
        default_count: Number of defaults; -1 where there are none at all.
        keywords: The keyword arguments with defaults; None where there are none at all.
        annotated: The names with annotations.
        submodules: Modules that the code uses as attributes of others.
        uses_modules: Whether any global or cell is a module.
    """

    texts: tuple[str | None, ...]
    module_texts: tuple[str | None, ...]
    modules: tuple[tuple[str, str], ...]
    names: tuple[str, ...]
    cells: tuple[str | None, ...]
    default_count: int
    keywords: tuple[str, ...] | None
    annotated: tuple[str, ...]
    submodules: tuple[str, ...]
    uses_modules: bool


class Code:
    """The part of a function that never changes. Thread-safe.

    Args:
        content: Its bytes. A worker that loads false bytes may run or crash on anything.

    Attributes:
        loaded: The result of ``load``, once it was called.
        is_slow: Whether the last function made of it took long; see ``SlowFunctions``.
    """

    __slots__ = ("content", "is_slow", "loaded")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.is_slow = True
        self.loaded: Loaded | None = None

    def load(self) -> Loaded:
        """Returns the parts of its functions; imports the modules that they use."""
        if self.loaded is None:
            code, *layout = marshal.loads(self.content)
            self.loaded = Loaded(code, Layout(*layout))
        return self.loaded


# At the sender


class _Shape(NamedTuple):
    """How functions with one code object are taken apart, as long as they look like this.

    Attributes:
        layout: The parts of the ``Code`` beside the code object.
        code: The ``Code``.
        absent: Names that are no globals; the receiver looks them up as built-in.
        module_count: The number of imported modules when submodules were looked for.
    """

    layout: Layout
    code: Code
    absent: tuple[str, ...]
    module_count: int


class _Known:
    """The known facts about a code object; they do not keep the code object alive.

    Attributes:
        reference: The code object.
        globals: The names of the globals that it refers to.
        shapes: The latest shapes of its functions.
    """

    __slots__ = ("globals", "reference", "shapes")

    def __init__(self, code: CodeType, reference: weakref.ref[CodeType]) -> None:
        self.reference = reference
        self.globals = (*dict.fromkeys(_globals_of(code)), "__path__")
        self.shapes: tuple[_Shape, ...] = ()


# Keyed by id: comparing code objects takes longer. The reference reveals an id that was given to
# another object.
_known: dict[int, _Known] = {}


def take_apart(function: FunctionType) -> tuple[Code, list[Any]] | None:
    """Returns the code of a function and the values that it captures, except its attributes.

    Returns None for an unusual function, which can only travel whole.
    """
    code = function.__code__
    known = _known.get(id(code))
    if known is None or known.reference() is not code:
        known = _remember(code)
    for shape in known.shapes:
        captured = _captured(function, shape)
        if captured is not None:
            return shape.code, captured
    learnt = _learn(function, known)
    captured = None if learnt is None else _captured(function, learnt)
    return None if learnt is None or captured is None else (learnt.code, captured)


def _remember(code: CodeType) -> _Known:
    if len(_known) >= _KNOWN_LIMIT:
        _known.clear()
    key = id(code)
    known = _known[key] = _Known(code, weakref.ref(code, lambda _: _known.pop(key, None)))
    return known


def _captured(function: FunctionType, shape: _Shape) -> list[Any] | None:
    """Returns the captured values of a function; None if it has another shape."""
    layout = shape.layout
    values = function.__globals__
    texts = function.__name__, function.__qualname__, function.__module__, function.__doc__
    if texts != layout.texts:
        return None
    get = values.get
    if (get("__name__"), get("__package__"), get("__file__")) != layout.module_texts:
        return None
    for name in shape.absent:
        if name in values:
            return None
    for name, module in layout.modules:
        value = get(name)
        if type(value) is not ModuleType or value.__name__ != module:
            return None
    if layout.uses_modules and not _are_by_name(shape):
        return None
    captured = []
    for name in layout.names:
        value = get(name, _ABSENT)
        if value is _ABSENT or type(value) is ModuleType:
            return None
        captured.append(value)
    if layout.cells and not _add_cells(function, layout, captured):
        return None
    return captured if _add_defaults(function, layout, captured) else None


def _are_by_name(shape: _Shape) -> bool:
    """Whether the modules that a function captures still go by name, with the same submodules."""
    if not cloudpickle.list_registry_pickle_by_value() <= _MAIN_NAMES:
        return False
    return shape.module_count == len(sys.modules)  # Else another one may have been imported.


def _add_cells(function: FunctionType, layout: Layout, captured: list[Any]) -> bool:
    """Adds the values in the cells of a function; returns whether it has that layout."""
    for cell, module in zip(function.__closure__ or (), layout.cells, strict=True):
        value = content_of(cell)
        if type(value) is ModuleType:
            if value.__name__ != module:
                return False
        elif module is not None or value is _ABSENT:
            return False
        else:
            captured.append(value)
    return True


def _add_defaults(function: FunctionType, layout: Layout, captured: list[Any]) -> bool:
    """Adds defaults and annotations of a function; returns whether it has that layout."""
    defaults, keywords = function.__defaults__, function.__kwdefaults__
    annotations = function.__annotations__
    if (-1 if defaults is None else len(defaults)) != layout.default_count:
        return False
    if defaults:
        captured += defaults
    if keywords is not None:
        if tuple(keywords) != layout.keywords:
            return False
        captured += keywords.values()
    elif layout.keywords is not None:
        return False
    if annotations or layout.annotated:
        captured += annotations.values()
        return tuple(annotations) == layout.annotated
    return True


def _learn(function: FunctionType, known: _Known) -> _Shape | None:
    """Notes the shape of a function; returns None for an unusual one."""
    module_count = len(sys.modules)
    layout = _layout(function, known)
    if layout is None:
        return None
    present = {*layout.names, *dict(layout.modules)}
    absent = tuple(name for name in known.globals if name not in present)
    others = tuple(each for each in known.shapes if each.layout != layout)
    former = next((each.code for each in known.shapes if each.layout == layout), None)
    if former is None:
        content = _marshalled((function.__code__, *layout))
        if content is None:
            return None
        former = Code(content)
    shape = _Shape(layout, former, absent, module_count)
    known.shapes = (shape, *others[: _SHAPES_LIMIT - 1])
    return shape


def _marshalled(value: Any) -> bytes | None:
    """Returns the bytes of a code; None if a constant has none."""
    for version in (_STABLE_VERSION, marshal.version):
        try:
            return marshal.dumps(value, version)
        except ValueError:  # An older version has no slices, which may be constants since 3.14.
            pass
    return None


def _layout(function: FunctionType, known: _Known) -> Layout | None:
    code, values = function.__code__, function.__globals__
    texts = function.__name__, function.__qualname__, function.__module__, function.__doc__
    module_texts = tuple(map(values.get, _MODULE_TEXTS))
    if not all(isinstance(each, _TEXTS) for each in (*texts, *module_texts)):
        return None
    if function.__module__ is None or not _is_constant(code):
        return None
    present = {name: values[name] for name in known.globals if name in values}
    modules = {name: value for name, value in present.items() if type(value) is ModuleType}
    contents = [content_of(cell) for cell in function.__closure__ or ()]
    used = [each for each in (*modules.values(), *contents) if type(each) is ModuleType]
    is_empty = any(each is _ABSENT for each in contents)
    if is_empty or not all(map(_goes_by_name, used)):
        return None
    keywords = function.__kwdefaults__
    return Layout(
        texts,
        module_texts,
        tuple((name, module.__name__) for name, module in modules.items()),
        tuple(name for name in present if name not in modules),
        tuple(each.__name__ if type(each) is ModuleType else None for each in contents),
        -1 if function.__defaults__ is None else len(function.__defaults__),
        None if keywords is None else tuple(keywords),
        tuple(function.__annotations__),
        tuple(_submodules(code, used)),
        bool(used),
    )


def _goes_by_name(module: ModuleType) -> bool:
    name = module.__name__
    by_value = is_registered_by_value(name) and name not in MAIN_MODULES
    return name in sys.modules and not by_value


def content_of(cell: CellType) -> object:
    """Returns the value in a cell; a value that is nothing else if there is none."""
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _is_constant(code: CodeType) -> bool:
    """Whether a code object has only constants that the compiler makes, which cannot change."""
    return all(map(_is_constant_value, code.co_consts))


def _is_constant_value(value: object) -> bool:
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_constant_value, value))
    if type(value) is slice:
        return _is_constant_value((value.start, value.stop, value.step))
    if type(value) is CodeType:
        return _is_constant(value)
    return type(value) in _CONSTANTS


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yields the globals that a function and those defined in it refer to, as cloudpickle does."""
    for step in dis.get_instructions(code):
        if step.opname in _GLOBAL_STEPS and step.argval not in _MODULE_TEXTS:
            yield step.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _globals_of(constant)


def _submodules(code: CodeType, modules: Iterable[ModuleType]) -> Iterator[str]:
    """Yields the imported submodules that code refers to as attributes of modules."""
    parents = [module.__name__ for module in modules if getattr(module, "__package__", None)]
    while parents:
        parent = parents.pop()
        for name in code.co_names:
            child = f"{parent}.{name}"
            if sys.modules.get(child) is not None:
                yield child
                parents.append(child)


# At the receiver


def received(content: bytes) -> Code:
    """Returns the code with these bytes; one that came lately is loaded already."""
    return _received(content) if len(content) <= _KEPT_BYTES else Code(content)


_received = functools.lru_cache(_MOST_KEPT)(Code)


class Loaded:
    """The parts of which functions are made.

    Attributes:
        count: The number of values that each function captures.
    """

    __slots__ = ("_attributes", "_cells", "_code", "_globals", "_layout", "_name", "count")

    def __init__(self, code: CodeType, layout: Layout) -> None:
        self._code, self._layout = code, layout
        self._name = layout.texts[0]
        texts = zip(_MODULE_TEXTS, layout.module_texts, strict=True)
        self._globals: dict[str, Any] = {name: text for name, text in texts if text is not None}
        self._globals["__builtins__"] = vars(builtins)
        for name, module in layout.modules:
            self._globals[name] = _module(module)
        for module in layout.submodules:
            _module(module)
        self._cells = [None if module is None else _module(module) for module in layout.cells]
        counts = len(layout.names), layout.cells.count(None), max(layout.default_count, 0)
        self.count = sum(counts) + len(layout.keywords or ()) + len(layout.annotated)
        self._attributes: list[tuple[str, Any]] = []
        plain = self.make({})
        made = zip(_OWN_TEXTS, layout.texts, strict=True)
        self._attributes += [each for each in made if getattr(plain, each[0]) != each[1]]

    def make(self, values: dict[str, Any]) -> FunctionType:
        """Returns a new function with certain globals, without its captured values."""
        values.update(self._globals)
        cells = tuple(map(CellType, self._cells)) if self._cells else None
        code = _copied(self._code) if _COMPILER in sys.modules else self._code
        function = FunctionType(code, values, self._name, None, cells)
        for name, value in self._attributes:
            setattr(function, name, value)
        return function

    def fill(self, function: FunctionType, captured: Sequence[Any]) -> None:
        """Gives a function its captured values."""
        layout, place = self._layout, 0
        if layout.names:
            place = len(layout.names)
            function.__globals__.update(zip(layout.names, captured, strict=False))
        if layout.cells:
            for cell, module in zip(function.__closure__ or (), layout.cells, strict=True):
                if module is None:
                    cell.cell_contents = captured[place]
                    place += 1
        if layout.default_count >= 0:
            function.__defaults__ = tuple(captured[place : place + layout.default_count])
            place += layout.default_count
        if layout.keywords is not None:
            values = captured[place : place + len(layout.keywords)]
            function.__kwdefaults__ = dict(zip(layout.keywords, values, strict=True))
            place += len(layout.keywords)
        if layout.annotated:
            function.__annotations__ = dict(zip(layout.annotated, captured[place:], strict=True))


def _copied(code: CodeType) -> CodeType:
    """Returns a copy of a code object, and of those in it.

    ``torch.compile`` keeps its results with the code object, and puts what they refer to into the
    globals of the function. So functions with globals of their own must not share a code object.
    """
    constants = [_copied(each) if type(each) is CodeType else each for each in code.co_consts]
    return code.replace(co_consts=tuple(constants))


def _module(name: str) -> object:
    return sys.modules["__main__"] if name in MAIN_MODULES else load_module(name)


def bind(code: Code, values: tuple[Any, ...]) -> tuple[FunctionType, tuple[Any, ...]]:
    """Makes a function of its code and the captured values in front of its arguments.

    Returns:
        The function and its arguments.

    Raises:
        SerializationError: A module that it uses cannot be imported here.
        ProtocolError: There are too few values.
    """
    loaded = code.loaded
    if loaded is None:
        try:
            loaded = code.load()
        except Exception as error:
            if is_of_handler(error):
                raise
            raise SerializationError(
                f"a received object cannot be rebuilt: {type(error).__name__}: {error}"
            ) from error
    count = loaded.count
    if len(values) < count:
        raise ProtocolError(f"a function captures {count} values, and {len(values)} came")
    function = loaded.make({})
    loaded.fill(function, values[:count])
    return function, values[count:]
