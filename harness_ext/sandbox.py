"""Jinja templates of unknown origin: an environment whose renderings are bounded in time and memory, and have no effects.

Jinja's own sandbox keeps a template away from Python's internals; it lets a template run for ever, fill the memory, and call
any public method of what it is given (an image of a dataset has `save`). Here

- templates see plain data, and of it the attributes and methods that are listed below, which neither write nor change anything;
- every operation is paid for from one `Budget` a rendering: one step, and the size of what goes in and comes out. What can
  grow faster than what goes in (`*`, `%`, `join`, `replace`, `center`, …) is paid for before it is computed;
- the output depends on the template and the document alone: no chance, no addresses of objects, no markup.

The meter is in the compiled template, so it holds in macros, loops, blocks and whatever calls whatever. Jinja folds constants
while it compiles; what is metered needs a rendering's budget, so nothing of it is computed then.
"""

from __future__ import annotations

import datetime
import functools
import numbers
import re
import types
import warnings
from collections import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor
from jinja2 import nodes
from jinja2.runtime import BlockReference, Context, LoopContext, Macro, TemplateReference, Undefined

__all__ = ["MAX_CHARACTERS", "MAX_SIZE", "MAX_STEPS", "Environment", "Refused"]

MAX_STEPS = 100_000
"""Steps of one rendering: loop steps, calls, filters, tests and operators."""

MAX_SIZE = 20_000_000
"""Characters that all operations of one rendering may take and give together; an item of a container counts as ten."""

MAX_CHARACTERS = 1_000_000
"""The longest text. The longest IMDb review has 13,704 characters."""

_ITEM = 10
_MAX_BITS = 4096  # of an integer
_MAX_DIGITS = 300  # of `round`, the range of a double
_BUDGET = "its budget"  # a name in the rendering's context that, with its blank, no template can write


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_STRING = _names(
    """
    capitalize casefold center count endswith find format index isalnum isalpha isascii isdecimal isdigit isidentifier
    islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition removeprefix removesuffix
    replace rjust rstrip split splitlines startswith strip swapcase title upper zfill
    """
)
_DATE = _names(
    """
    year month day hour minute second microsecond date time isoformat weekday isoweekday days seconds total_seconds
    """
)
_DATES = (datetime.date, datetime.time, datetime.timedelta)
_CONTAINERS = (list, tuple, set, frozenset, abc.KeysView, abc.ValuesView, abc.ItemsView)
_PRINTABLE = (str, numbers.Number, *_DATES, dict, range, *_CONTAINERS)
_ATTRIBUTES: tuple[tuple[tuple[type, ...], frozenset[str]], ...] = (
    ((str,), _STRING),
    ((dict,), frozenset(("get", "items", "keys", "values"))),
    ((tuple,), frozenset(("count", "index", "grouper", "list"))),  # the last two of what `groupby` gives
    ((list,), frozenset(("count", "index"))),
    (_DATES, _DATE),
    ((jinja2.utils.Cycler,), frozenset(("next", "reset", "current"))),
)
_OF_JINJA = (LoopContext, jinja2.utils.Namespace, TemplateReference, BlockReference)
_CALLABLE_TYPES = (Macro, LoopContext, BlockReference, jinja2.utils.Joiner)
_CALLABLES = (jinja2.sandbox.safe_range, dict, jinja2.utils.Cycler, jinja2.utils.Joiner, jinja2.utils.Namespace)
_FILTERS = _names(
    """
    abs batch capitalize center count d default dictsort e escape first float format groupby indent int items join last
    length list lower map max min reject rejectattr replace reverse round safe select selectattr slice sort string
    striptags sum title tojson trim truncate unique upper urlencode wordcount
    """
)
"""Jinja's without chance (random), printing (pprint), attributes (attr) and what no prompt needs."""

_TO_TEXT = _names(
    """
    capitalize center e escape format indent join lower replace safe string striptags title trim truncate upper urlencode
    wordcount
    """
)
"""Those that print what they are given."""

_PERCENT_STAR = re.compile(r"%[^%a-zA-Z*]*\*")


class Refused(RuntimeError):
    """A template does what a prompt may not."""


class Budget:
    """What one rendering may still do."""

    def __init__(self) -> None:
        self._steps, self._size = MAX_STEPS, MAX_SIZE

    def step(self) -> None:
        """Pay for one operation."""
        self._steps -= 1
        if self._steps < 0:
            raise Refused(f"its loops and calls take more than {MAX_STEPS:,} steps")

    def spend(self, size: int) -> None:
        """Pay for characters."""
        self._size -= size
        if self._size < 0:
            raise Refused(f"its operations take more than {MAX_SIZE:,} characters in all")

    def charge(self, *values: Any) -> None:
        """Pay for values, containers with all that is in them: two lists of one list cost that list twice."""
        stack = list(values)
        while stack:
            value = stack.pop()
            if isinstance(value, str | bytes):
                self.spend(len(value))
            elif isinstance(value, bool | None):
                pass
            elif isinstance(value, int):
                if value.bit_length() > _MAX_BITS:
                    raise Refused(f"it computes an integer of more than {_MAX_BITS:,} bits")
            elif isinstance(value, abc.Mapping):
                self.spend(_ITEM * len(value))
                stack += [*value.keys(), *value.values()]
            elif isinstance(value, _CONTAINERS):
                self.spend(_ITEM * len(value))
                stack += value
            elif isinstance(value, range):
                self.spend(_ITEM * len(value))

    def counted(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each for a step."""
        for item in items:
            self.step()
            yield item

    def reserve(self, size: int, what: str) -> None:
        """Pay for a value that is about to be made, if there may be one of this size."""
        if size > MAX_CHARACTERS:
            raise Refused(f"it {what} to more than {MAX_CHARACTERS:,} items")
        self.spend(size)


def _budget(context: Context) -> Budget:
    budget = context[_BUDGET]
    assert isinstance(budget, Budget)
    return budget


# ------------------------------------------------------------------------------------------------- what grows


def _integers(arguments: Iterable[Any]) -> int:
    """Sum of the absolute values of integers: widths, counts and lengths."""
    return sum(abs(value) for value in arguments if isinstance(value, int) and not isinstance(value, bool))


def _digits(spec: str) -> int:
    """Sum of the numbers in a format, which may each be a width."""
    return sum(int(number) if len(number) < 8 else MAX_CHARACTERS + 1 for number in re.findall(r"\d+", spec, re.ASCII))


def _reserve_percent(budget: Budget, text: str, values: Any) -> None:
    """Pay for `text % values` beforehand; a `*` would take a width from the values."""
    if _PERCENT_STAR.search(text):
        raise Refused("it formats with a width of *")
    _print(budget, values)
    budget.reserve(_digits(text), "formats")
    arguments = (
        values.values() if isinstance(values, abc.Mapping) else values if isinstance(values, tuple) else (values,)
    )
    longest = max(map(_size_of_text, arguments), default=0)
    budget.spend(text.count("%") * longest)


def _size_of_text(value: Any) -> int:
    """At least as many characters as a value has when it is printed, a container's contents included."""
    if isinstance(value, str):
        return 2 + 10 * len(value)  # of its repr, where every character is escaped
    size, stack = 0, [value]
    while stack and size < MAX_SIZE:
        value = stack.pop()
        if isinstance(value, abc.Mapping):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, _CONTAINERS):
            stack += value
        size += 10 * len(value) if isinstance(value, str | bytes) else 2000  # a long integer, or a float in full
    return size


def _reserve_join(budget: Budget, separator: Any, items: Any) -> None:
    if isinstance(items, abc.Sized):
        budget.reserve(len(items) * len(str(separator)), "joins")


def _reserve_replace(budget: Budget, text: Any, old: Any, new: Any) -> None:
    budget.reserve(len(str(text)) + str(text).count(str(old)) * len(str(new)), "replaces")


def _reserve_filter(budget: Budget, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Pay beforehand for filters whose result may be much larger than what they are given."""

    def argument(position: int, key: str, default: Any = None) -> Any:
        return kwargs[key] if key in kwargs else args[position] if len(args) > position else default

    value = args[0] if args else None
    if name in _TO_TEXT:
        for given in (*args, *kwargs.values()):
            if given is not None:
                _print(budget, given)
    if name in ("center", "batch", "slice", "truncate"):
        budget.reserve(_integers((*args[1:], *kwargs.values())), "pads")
    elif name == "indent":
        width = argument(1, "width", 4)
        of_line = len(width) if isinstance(width, str) else _integers((width,))
        budget.reserve(of_line * (len(str(value).splitlines()) + 1), "indents")
    elif name == "replace":
        _reserve_replace(budget, value, argument(1, "old", ""), argument(2, "new", ""))
    elif name == "join":
        _reserve_join(budget, argument(1, "d", ""), value)
    elif name == "format":
        _reserve_percent(budget, str(value), dict(kwargs) or args[1:])
    elif name == "round" and _integers((argument(1, "precision", 0),)) > _MAX_DIGITS:
        raise Refused(f"it rounds to more than {_MAX_DIGITS} digits")
    elif name == "tojson" and argument(1, "indent") is not None:
        raise Refused("it indents JSON")
    elif name == "sum" and not isinstance(argument(2, "start", 0), numbers.Number):
        raise Refused("it sums what are no numbers")


def _reserve_method(budget: Budget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """The same for methods of strings."""
    if name in ("center", "ljust", "rjust", "zfill"):
        budget.reserve(_integers(args), "pads")
    elif name == "join" and args:
        _reserve_join(budget, text, args[0])
    elif name == "replace" and len(args) > 1:
        _reserve_replace(budget, text, args[0], args[1])


class _Formatter(jinja2.sandbox.SandboxedFormatter):
    """`str.format` by a budget."""

    def __init__(self, environment: jinja2.Environment, budget: Budget) -> None:
        super().__init__(environment)
        self._budget = budget

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._budget.step()
        self._budget.reserve(_digits(format_spec), "formats")
        _print(self._budget, value)
        result = super().format_field(value, format_spec)
        self._budget.charge(result)
        return result

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion:
            _print(self._budget, value)
            self._budget.spend(_size_of_text(value))
        return super().convert_field(value, conversion)


class _Format:
    """`text.format`, which only `Environment.call` can call."""

    def __init__(self, text: str) -> None:
        self.text = text


# ------------------------------------------------------------------------------------------------- values


def _printable(value: Any) -> Any:
    """Refuse what Jinja would print as `None`, as `<function …>` or with an address, for the model to read."""
    if isinstance(value, Undefined):
        str(value)  # raises and says why; within a list it would be printed as `Undefined`
    if isinstance(value, _PRINTABLE):
        return value
    if value is None:
        raise Refused("it prints a null value (None)")
    if callable(value) or isinstance(value, _Format):
        raise Refused(f"it prints a function, {getattr(value, '__name__', type(value).__name__)}")
    raise Refused(f"it prints a value of type {type(value).__name__}, which is no text and no number")


@jinja2.pass_context
def _finalize(context: Context, value: Any) -> Any:
    budget = _budget(context)
    if isinstance(value, str):
        budget.spend(len(value))
        return value
    _print(budget, value)
    return value


def _print(budget: Budget, value: Any) -> None:
    """Pay for the text of a value, and refuse one without."""
    stack = [_printable(value)]
    budget.charge(value)
    while stack:
        of_container = stack.pop()
        if isinstance(of_container, abc.Mapping):
            of_container = [*of_container.keys(), *of_container.values()]
        if isinstance(of_container, _CONTAINERS):
            stack += [inner if inner is None or isinstance(inner, str) else _printable(inner) for inner in of_container]


@jinja2.pass_context
def _concatenated(context: Context, pieces: Sequence[Any]) -> str:
    budget = _budget(context)
    for piece in pieces:
        _finalize(context, piece)
    text = "".join(map(str, pieces))
    budget.spend(len(text))
    return text


@jinja2.pass_context
def _charged(context: Context, value: Any) -> Any:
    budget = _budget(context)
    budget.step()
    budget.charge(value)
    return value


@jinja2.pass_context
def _counted(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    return _budget(context).counted(items)


def _metered(name: str, function: Callable[..., Any], *, is_filter: bool) -> Callable[..., Any]:
    """A filter or a test that pays for what it takes and gives."""
    wants = jinja2.utils._PassArg.from_obj(function)

    def first(context: Context) -> tuple[Any, ...]:
        """What a function of Jinja's asks for before its value."""
        if wants is jinja2.utils._PassArg.context:
            return (context,)
        if wants is jinja2.utils._PassArg.eval_context:
            return (context.eval_ctx,)
        return (context.environment,) if wants is jinja2.utils._PassArg.environment else ()

    @jinja2.pass_context
    @functools.wraps(function, assigned=("__doc__",), updated=())
    def metered(context: Context, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        budget.step()
        budget.charge(*args, *kwargs.values())
        if name == "join" and args and isinstance(args[0], abc.Iterator):
            args = (list(args[0]), *args[1:])
        if is_filter:
            _reserve_filter(budget, name, args, kwargs)
        result = function(*first(context), *args, **kwargs)
        if isinstance(result, abc.Iterator):
            return budget.counted(result)
        if isinstance(result, str):
            result = str.__str__(result)  # and no Markup, which escapes what it meets
        budget.charge(result)
        return result

    return metered


# ------------------------------------------------------------------------------------------------- the environment


_LITERALS = (nodes.Const, nodes.List, nodes.Tuple, nodes.Dict, nodes.Pair)


class _Meter(jinja2.visitor.NodeTransformer):
    """Puts the meter into a syntax tree, where Jinja's environment has no hook."""

    def _filter(self, node: Any, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # which goes through `finalize`: a loop may print it often

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(nodes.List(node.nodes, lineno=node.lineno), "_concatenated")

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        node.expr = self._filter(node.expr, "_charged")
        for operand in node.ops:
            operand.expr = self._filter(operand.expr, "_charged")
        return node

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter(node.iter, "_counted")
        return node

    def _visit_container(self, node: Any) -> nodes.Node:
        is_literal = all(isinstance(inner, _LITERALS) for inner in node.find_all(nodes.Node))
        if is_literal or getattr(node, "ctx", "load") != "load":
            return node
        self.generic_visit(node)
        return self._filter(node, "_charged")

    visit_List = visit_Dict = visit_Tuple = _visit_container

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        # Slices bypass the environment.
        return self._filter(node, "_charged") if isinstance(node.arg, nodes.Slice) else node


_FORBIDDEN: dict[type[nodes.Node], str] = {
    **dict.fromkeys(
        (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends),
        "a prompt is one self-contained file; include, import and extends are refused",
    ),
    nodes.EvalContextModifier: "a prompt is no HTML; autoescape is refused",
}


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose output depends on the template and the document alone, and is bounded."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, finalize=_finalize, keep_trailing_newline=True)
        filters: dict[str, Any] = {name: self.filters[name] for name in _FILTERS}
        tests: dict[str, Any] = dict(self.tests)
        self.filters = {name: _metered(name, function, is_filter=True) for name, function in filters.items()}
        self.filters |= {"_charged": _charged, "_concatenated": _concatenated, "_counted": _counted}
        self.tests = {name: _metered(name, function, is_filter=False) for name, function in tests.items()}
        del self.globals["lipsum"]

    def metered(self, tree: nodes.Template) -> jinja2.Template:
        """Compile a template, which it changes, with the meter in it.

        Raises:
            jinja2.TemplateSyntaxError: If it is none, or does what a prompt may not.
        """
        for node in tree.find_all(tuple(_FORBIDDEN)):
            reason = next(reason for kind, reason in _FORBIDDEN.items() if isinstance(node, kind))
            raise jinja2.TemplateSyntaxError(reason, node.lineno)
        tree = _Meter().visit(tree)
        tree.set_environment(self)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # Python's, of the code that Jinja makes of `{{ 1[0] }}`
            return self.from_string(tree)

    def pieces(self, template: jinja2.Template, variables: Mapping[str, Any]) -> Iterator[str]:
        """Render a template piece by piece.

        Raises:
            Refused: If it does what a prompt may not.
            Exception: Whatever its expressions raise.
        """
        size = 0
        for piece in template.generate({**variables, _BUDGET: Budget()}):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise Refused(f"it renders to more than {MAX_CHARACTERS:,} characters")
            yield piece

    # ----------------------------------------------------------------------------------------- hooks of the sandbox

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator of two operands, paid for."""
        budget = _budget(context)
        budget.step()
        budget.charge(left, right)
        if operator == "**":
            raise Refused("it uses **")
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | bytes | list | tuple) and isinstance(times, int):
                    budget.reserve(max(len(sequence) * times, 0), "repeats a value")
        if operator == "%" and isinstance(left, str | bytes):
            _reserve_percent(budget, str(left), right)
        result = super().call_binop(context, operator, left, right)
        budget.charge(result)
        return result

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Whether an attribute is among those that are listed."""
        if not super().is_safe_attribute(obj, attr, value):
            return False
        if isinstance(obj, _OF_JINJA):
            return True
        return next((attr in allowed for kinds, allowed in _ATTRIBUTES if isinstance(obj, kinds)), False)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute, or the item of this name of a mapping."""
        is_column = isinstance(obj, abc.Mapping) and attribute in obj
        if is_column and not self.is_safe_attribute(obj, attribute, None):
            return obj[attribute]
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item of plain data."""
        if isinstance(obj, abc.Mapping | abc.Sequence | Undefined | TemplateReference):
            return super().getitem(obj, argument)
        return self.getattr(obj, argument) if isinstance(argument, str) else self.undefined(obj=obj, name=argument)

    def wrap_str_format(self, value: Any) -> Any:
        """What stands for `text.format`; see `call`."""
        if not isinstance(value, types.BuiltinMethodType) or value.__name__ != "format":
            return None
        return _Format(str(value.__self__)) if isinstance(value.__self__, str) else None

    def is_safe_callable(self, obj: Any) -> bool:
        """Whether something is a macro, one of Jinja's own functions, or a method that `is_safe_attribute` let through."""
        if isinstance(obj, _CALLABLE_TYPES) or any(obj is known for known in _CALLABLES):
            return True
        owner = getattr(obj, "__self__", None)
        if not isinstance(obj, types.MethodType | types.BuiltinMethodType):
            return False
        return self.is_safe_attribute(owner, obj.__name__, obj)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call something, paid for. The names are those of Jinja, lest they clash with keywords of the template."""
        budget = _budget(__context)
        budget.step()
        args = tuple(list(value) if isinstance(value, types.GeneratorType) else value for value in args)
        budget.charge(*args, *kwargs.values())
        if isinstance(__obj, _Format):
            budget.charge(__obj.text)
            return _Formatter(__self, budget).vformat(__obj.text, args, kwargs)
        if isinstance(__obj, Undefined):
            return __obj(*args, **kwargs)  # raises and says why
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            budget.charge(owner)
            _reserve_method(budget, owner, __obj.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge(result)
        return result
