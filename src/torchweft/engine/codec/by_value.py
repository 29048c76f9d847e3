"""Sends functions and classes by value, where the receiver cannot import them.

cloudpickle writes a function whole: its code, and the globals, cells and defaults that it refers
to. That takes hundreds of bytes, and more time than the rest of a small call. But the code of a
function cannot change, and a program sends the same functions again and again. So a function is
*taken apart* here into a ``Code`` and the captured values. These may change at any time, and are
sent anew with each call. Nothing about captured values is remembered, so nothing can be outdated;
and each call gets a new function.

A ``Code`` has all parts of a function that are texts, and the names of captured modules:

- the code object, the function's name, qualified name, module and docstring;
- ``__name__``, ``__package__`` and ``__file__`` of the module that it was written in;
- which globals and cells are modules, and their names; the submodules that the code refers to;
- which globals are captured, and how many cells, defaults and annotations there are.

cloudpickle takes classes apart, and writes unusual functions whole (an empty cell, a docstring that
is no text, constants that a program has put into a code object).
"""

from __future__ import annotations

import builtins
import dis
import functools
import marshal
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple, NewType, ParamSpec
from weakref import WeakKeyDictionary

from torchweft.engine.codec.functions import (
    MAIN_MODULES,
    is_registered_by_value,
    load_module,
)
from torchweft.engine.threads.interrupts import is_of_handler
from torchweft.errors import SerializationError, WeftError

_LAYOUTS_LIMIT = 4
_MOST_KEPT = 512
"""Codes of others that stay loaded, those that were used last."""
_KEPT_BYTES = 32 << 10
"""Longer code is loaded each time that it comes."""
_STABLE_VERSION = 2
"""Format of ``marshal`` in which equal objects have equal bytes, however they came about."""
_GLOBAL_STEPS = frozenset({"LOAD_GLOBAL", "STORE_GLOBAL", "DELETE_GLOBAL"})
_MODULE_TEXTS = ("__name__", "__package__", "__file__")
_OWN_TEXTS = ("__name__", "__qualname__", "__module__", "__doc__")
_TEXTS = (str, type(None))
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, type(...), CodeType)
_ABSENT = object()
_COMPILER = "torch._dynamo"


# At the sender


class Code:
    """The part of a function that never changes. Thread-safe.

    Args:
        content: Its bytes. A worker that loads false bytes may run or crash on anything.

    Attributes:
        loaded: The parts that the receiver makes of it; None before.
    """

    __slots__ = ("content", "loaded")

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.loaded: Any = None

    def __reduce__(self) -> Any:
        return received, (self.content,)


class _Known:
    """The known facts about a code object.

    Attributes:
        globals: The names of the globals that it refers to.
        is_constant: Whether it has only constants that cannot change.
        codes: The codes of its latest functions, by their layouts.
    """

    __slots__ = ("codes", "globals", "is_constant")

    def __init__(self, code: CodeType) -> None:
        self.globals = (*dict.fromkeys(_globals_of(code)), "__path__")
        self.is_constant = _is_constant(code)
        self.codes: dict[tuple[Any, ...], Code] = {}


_known: WeakKeyDictionary[CodeType, _Known] = WeakKeyDictionary()


def take_apart(function: FunctionType) -> tuple[Code, list[Any]] | None:
    """Returns the code of a function and the values that it captures, except its attributes.

    Returns None for an unusual function, which can only travel whole.
    """
    code = function.__code__
    known = _known.get(code)
    if known is None:
        known = _known[code] = _Known(code)
    if function.__module__ is None or not known.is_constant:
        return None
    of_module = function.__globals__.get
    captured: list[Any] = []
    used: list[ModuleType] = []
    modules, names = [], []
    for name in known.globals:
        value = of_module(name, _ABSENT)
        if type(value) is ModuleType:
            modules.append((name, value.__name__))
            used.append(value)
        elif value is not _ABSENT:
            names.append(name)
            captured.append(value)
    cells: list[str | None] = []
    for cell in function.__closure__ or ():
        value = _content_of(cell)
        if value is _ABSENT:
            return None
        if type(value) is ModuleType:
            cells.append(value.__name__)
            used.append(value)
        else:
            cells.append(None)
            captured.append(value)
    if used and not all(map(_goes_by_name, used)):
        return None
    defaults, keywords = function.__defaults__, function.__kwdefaults__
    annotations = function.__annotations__
    if defaults:
        captured += defaults
    if keywords:
        captured += keywords.values()
    if annotations:
        captured += annotations.values()
    # As ``Layout``, which takes longer to make.
    layout = (
        (function.__name__, function.__qualname__, function.__module__, function.__doc__),
        (of_module("__name__"), of_module("__package__"), of_module("__file__")),
        tuple(modules),
        tuple(names),
        tuple(cells),
        -1 if defaults is None else len(defaults),
        None if keywords is None else tuple(keywords),
        tuple(annotations),
        tuple(_submodules(code, used)) if used else (),
        bool(used),
    )
    try:
        made = known.codes.get(layout)
    except TypeError:  # A text of the function is none, and has no hash.
        return None
    if made is None:
        made = _new_code(code, known, layout)
    return None if made is None else (made, captured)


def _new_code(code: CodeType, known: _Known, layout: tuple[Any, ...]) -> Code | None:
    """Returns a code that was not sent lately; None if a text or a constant has no bytes."""
    if not all(isinstance(each, _TEXTS) for each in (*layout[0], *layout[1])):
        return None
    content = _marshalled((code, *layout))
    if content is None:
        return None
    if len(known.codes) >= _LAYOUTS_LIMIT:
        known.codes.clear()
    made = known.codes[layout] = Code(content)
    return made


def _marshalled(value: Any) -> bytes | None:
    """Returns the bytes of a code; None if a constant has none."""
    for version in (_STABLE_VERSION, marshal.version):
        try:
            return marshal.dumps(value, version)
        except ValueError:  # An older version has no slices, which may be constants since 3.14.
            pass
    return None


def _goes_by_name(module: ModuleType) -> bool:
    name = module.__name__
    by_value = is_registered_by_value(name) and name not in MAIN_MODULES
    return name in sys.modules and not by_value


def _content_of(cell: CellType) -> object:
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


class Loaded:
    """The parts of which functions are made."""

    __slots__ = ("_attributes", "_cells", "_code", "_globals", "_layout", "_name")

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


def load(code: Code) -> Loaded:
    """Returns the parts of the functions of a code; imports the modules that they use."""
    loaded: Loaded | None = code.loaded
    if loaded is None:
        content, *layout = marshal.loads(code.content)
        loaded = code.loaded = Loaded(content, Layout(*layout))
    return loaded


def _copied(code: CodeType) -> CodeType:
    """Returns a copy of a code object, and of those in it.

    ``torch.compile`` keeps its results with the code object, and puts what they refer to into the
    globals of the function. So functions with globals of their own must not share a code object.
    """
    constants = [_copied(each) if type(each) is CodeType else each for each in code.co_consts]
    return code.replace(co_consts=tuple(constants))


def _module(name: str) -> object:
    return sys.modules["__main__"] if name in MAIN_MODULES else load_module(name)


def not_rebuilt(error: Exception) -> Exception:
    """Returns the error of a received object that cannot be made; itself if it tells the cause."""
    if isinstance(error, WeftError) or is_of_handler(error):
        return error
    text = f"a received object cannot be rebuilt: {type(error).__name__}: {error}"
    made = SerializationError(text)
    made.__cause__ = error
    return made


def make_function(code: Code, values: dict[str, Any]) -> FunctionType:
    """Makes a function in a pickle, without captured values: they may refer to the function."""
    return load(code).make(values)


def fill_function(function: FunctionType, state: tuple[Code, Any, dict[str, Any] | None]) -> None:
    """Gives a function in a pickle its captured values and attributes."""
    code, captured, attributes = state
    load(code).fill(function, captured)
    if attributes:
        vars(function).update(attributes)


def reduce_function(function: FunctionType, globals_of: dict[int, dict[str, Any]]) -> Any:
    """Reduces a function that goes by value; None if it can only travel whole.

    Args:
        function: The function.
        globals_of: The globals of the functions in the same pickle, which go on sharing them, by
            the identities of the originals.
    """
    compiler = _compiler_of(function)
    if compiler is not None:
        return compiler, (vars(function)["_torchdynamo_orig_callable"],)
    parts = take_apart(function)
    if parts is None:
        return None
    code, captured = parts
    values = globals_of.setdefault(id(function.__globals__), {})
    state = (code, tuple(captured), function.__dict__ or None)
    return make_function, (code, values), state, None, None, fill_function


# Objects beside functions and classes that a program defines, which pickle takes for globals of
# their module, or cannot take apart. Type variables are among the annotations of functions.


def make_cached(function: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Makes a function with an empty cache; see ``functools.lru_cache``."""
    made: Callable[..., Any] = functools.lru_cache(**parameters)(function)
    return made


def _reduce_cached(cached: Any) -> Any:
    return make_cached, (cached.__wrapped__, cached.cache_parameters())


def _reduce_new_type(kind: Any) -> Any:
    return NewType, (kind.__qualname__, kind.__supertype__), vars(kind)


def _reduce_by_name_alone(variable: Any) -> Any:
    return type(variable), (variable.__name__,)


def _reduce_cached_property(value: functools.cached_property[Any]) -> Any:
    # Until Python 3.12 it has a lock.
    state = {name: part for name, part in vars(value).items() if name != "lock"}
    return type(value), (value.func,), state


def _reduce_weak_keys(values: WeakKeyDictionary[Any, Any]) -> Any:
    return type(values), (dict(values),)  # functools.singledispatch has one.


def make_typed_dict(meta: Any, name: str, namespace: dict[str, Any], keys: dict[str, Any]) -> Any:
    """Makes a ``TypedDict``; cloudpickle gives it a base class that it must not have."""
    made = meta(name, (), namespace)
    for key, value in keys.items():
        setattr(made, key, value)
    return made


def is_typed_dict(kind: type) -> bool:
    """Tells whether a class is a ``TypedDict``."""
    return type(kind).__name__ == _TYPED_DICT_META


def reduce_typed_dict(kind: Any) -> Any:
    """Reduces a ``TypedDict`` that has no name in a module."""
    names = "__module__", "__qualname__", "__doc__", "__annotations__"
    namespace = {name: getattr(kind, name) for name in names}
    keys = {name: getattr(kind, name) for name in _KEYS_OF_TYPED_DICT}
    return make_typed_dict, (type(kind), kind.__name__, namespace, keys)


_KEYS_OF_TYPED_DICT = "__total__", "__required_keys__", "__optional_keys__"
_TYPED_DICT_META = "_TypedDictMeta"
"""The name of its type, in ``typing`` and ``typing_extensions``."""

REDUCERS: dict[type, Callable[[Any], Any]] = {
    type(functools.lru_cache(int)): _reduce_cached,
    NewType: _reduce_new_type,
    functools.cached_property: _reduce_cached_property,
    WeakKeyDictionary: _reduce_weak_keys,
    **dict.fromkeys(
        (ParamSpec, *filter(None, [getattr(typing, "TypeVarTuple", None)])), _reduce_by_name_alone
    ),
}
"""Reducers for objects that have no name in a module, by type."""


def _compiler_of(function: FunctionType) -> Any:
    """Returns the object of ``torch.compile`` that made a function of another one, or None."""
    if "_torchdynamo_orig_callable" not in vars(function):
        return None
    for cell in function.__closure__ or ():
        content = _content_of(cell)
        # Its class reduces itself, for compiled modules.
        if type(content).__name__ == "OptimizeContext":
            return content
    return None


def reduce_module(module: ModuleType) -> Any:
    """Reduces a module that only its parent has, as extensions written in C make them."""
    parent, _, name = module.__name__.rpartition(".")
    home = sys.modules.get(parent)
    if module.__name__ in sys.modules or getattr(home, name, None) is not module:
        return NotImplemented
    return getattr, (home, name)
