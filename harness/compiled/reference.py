"""How numba sees the state: one address, behind which the arrays and numbers of nested named tuples lie.

Such a tuple passed by value is some 700 words, in every call and from Python too. An address is one word. What is
behind it does not change while compiled code runs, only what the arrays hold; so its loads are marked invariant.
"""

import hashlib
from typing import Any

import numpy as np
from llvmlite import ir
from numba import int32, int64, typeof
from numba.core import cgutils
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder, Flags, compile_extra
from numba.core.datamodel.models import OpaqueModel
from numba.core.datamodel.registry import register_default
from numba.core.extending import NativeValue, intrinsic, overload, unbox
from numba.core.imputils import lower_getattr_generic
from numba.core.registry import cpu_target
from numba.core.types.abstract import Callable, Type
from numba.core.types.common import Opaque
from numba.core.types.containers import BaseNamedTuple, BaseTuple, Tuple
from numba.core.types.misc import unliteral
from numba.core.types.npytypes import Array
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.np.arrayobj import make_array

from harness.compiled.state import members

_WORD = ir.IntType(64)


class Reference(Type):
    """The address of a named tuple of the type `fields`."""

    def __init__(self, fields: BaseNamedTuple) -> None:
        self.fields = fields
        digest = hashlib.sha256(str(fields).encode()).hexdigest()[:12]  # it is a part of every symbol
        super().__init__(f"{fields.instance_class.__name__}_at_{digest}")

    def member(self, name: str) -> tuple[Type, int]:
        """The type of a field, and at which word it begins."""
        place = self.fields.fields.index(name)
        return self.fields.types[place], sum(map(_words_of, self.fields.types[:place]))


register_default(Reference)(OpaqueModel)


def _words_of(kind: Type) -> int:
    if isinstance(kind, Array):
        return 3 + 2 * int(kind.ndim)  # elements, bytes of one, address, shape, strides
    return sum(map(_words_of, kind.types)) if isinstance(kind, BaseTuple) else 1


class _Part(Callable, Opaque):
    """A function as compiled code calls it: with integers of 64 bits, and no constant is compiled into it.

    It is compiled once for types of arguments, where `register_jitable` does so for each kind of caller, and as far as
    LLVM's input: all is optimised once, with the function that Python calls, not in every function above again.
    """

    def __init__(self, function: Any, inlined: bool) -> None:
        self._function, self._known = function, dict[tuple[Any, ...], Any]()
        flags = self._flags = Flags()
        flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
        flags.nrt, flags.forceinline = False, inlined
        super().__init__(f"{function.__module__}.{function.__qualname__}")

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        """The signature of a call; it compiles."""
        wide = tuple(int64 if each == int32 else each for each in map(unliteral, args))
        if wide not in self._known:
            target, of = cpu_target.target_context, (self._function, wide, None, self._flags)
            done = self._known[wide] = compile_extra(context, target, *of, {}, pipeline_class=_Unfinished)
            target.insert_user_function(done.fndesc, done.fndesc, [done.library])
        return self._known[wide].signature

    def get_call_signatures(self) -> Any:
        """None is known before a call."""
        return [], True

    def get_impl_key(self, signature: Any) -> Any:
        """Under which numba finds the code of a call."""
        return self._known[signature.args].fndesc


class _Unfinished(CompilerBase):  # type: ignore[misc]
    def define_pipelines(self) -> Any:
        self.state.library = _Input(self.state.targetctx.codegen(), self.state.func_id.func_qualname)
        return [DefaultPassBuilder.define_nopython_pipeline(self.state)]


class _Input(JITCodeLibrary):  # type: ignore[misc]
    """What is linked into the code that calls it, and neither optimised nor assembled before."""

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalized = True


register_default(_Part)(OpaqueModel)


def compile_where_called(function: Any, inlined: bool) -> None:
    """Tell numba that compiled code which names `function` calls it compiled; `inlined` in the place of the call."""
    cpu_target.typing_context.insert_global(function, _Part(function, inlined))


@infer_getattr
class _Members(AttributeTemplate):  # type: ignore[misc]
    key = Reference

    def generic_resolve(self, reference: Reference, name: str) -> Type | None:
        if name not in reference.fields.fields:
            return None
        kind, _ = reference.member(name)
        return Reference(kind) if isinstance(kind, BaseNamedTuple) else kind


@lower_getattr_generic(Reference)  # type: ignore[untyped-decorator]
def _member(context: Any, builder: Any, reference: Reference, value: Any, name: str) -> Any:
    kind, first = reference.member(name)
    words = builder.gep(builder.bitcast(value, _WORD.as_pointer()), [ir.Constant(_WORD, first)])
    return _load(context, builder, kind, words)


def _load(context: Any, builder: Any, kind: Type, words: Any) -> Any:
    def word(place: int, what: Any = _WORD) -> Any:
        at = builder.gep(words, [ir.Constant(_WORD, place)])
        loaded = builder.load(builder.bitcast(at, what.as_pointer()))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    if isinstance(kind, BaseNamedTuple):
        return builder.bitcast(words, context.get_value_type(Reference(kind)))
    if not isinstance(kind, Array):
        return word(0, context.get_value_type(kind))
    array, many = make_array(kind)(context, builder), kind.ndim
    array.meminfo = cgutils.get_null_value(array.meminfo.type)
    array.parent = cgutils.get_null_value(array.parent.type)
    array.nitems, array.itemsize = word(0), word(1)
    array.data = word(2, array.data.type)
    array.shape = cgutils.pack_array(builder, [word(3 + place) for place in range(many)])
    array.strides = cgutils.pack_array(builder, [word(3 + many + place) for place in range(many)])
    return array._getvalue()


def _loads_all(_: Any, reference: Reference) -> Any:
    def lowered(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        loaded = [_member(context, builder, reference, values[0], name) for name in reference.fields.fields]
        return context.make_tuple(builder, signature.return_type, loaded)

    return Tuple(reference.fields.types)(reference), lowered


_all_members: Any = intrinsic(_loads_all)


@overload(members)  # not inlined as numba does it, which loses the loop
def _members_of(reference: Reference) -> Any:
    def found(reference: Reference) -> Any:
        return _all_members(reference)

    return found


@unbox(Reference)  # type: ignore[untyped-decorator]
def _address(kind: Reference, value: Any, context: Any) -> NativeValue:
    return NativeValue(context.pyapi.long_as_voidptr(value))


def reference_to(state: Any) -> tuple[Reference, np.ndarray[Any, np.dtype[np.int64]]]:
    """The type of a reference to `state`, and the words to which it refers. The words hold no reference to arrays."""
    return Reference(typeof(state)), np.array(list(_words(state)), dtype=np.int64)


def _words(value: Any) -> Any:
    if isinstance(value, tuple):
        for each in value:
            yield from _words(each)
    elif isinstance(value, np.ndarray):
        if not value.flags.c_contiguous:
            raise TypeError("only arrays without gaps are referred to")
        yield from (value.size, value.itemsize, value.ctypes.data, *value.shape, *value.strides)
    else:
        yield int(np.array(value).view(np.int64))
