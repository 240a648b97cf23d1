"""What a kernel's name says it is: its kind, the precision of its arithmetic, whether it used tensor cores, its library.

A name is rank D evidence: it says what was meant to run, never how well it ran. Patterns are data, in order, in
``kernel_patterns.tsv``; the first that fits wins. Names come in the spellings of nsys, Kineto and rocprof, and mangled.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

# The one definition of a communication kernel: slices, measures and rules must agree on it.
_COMMUNICATION = re.compile(
    r"^(?!triton_[a-z]+_fused).*?(?<![a-z])(?:[nr]ccl(?-i:[A-Z_:])|msccl(?:pp)?(?-i:[A-Z_:])|nvshmem"
    r"|cross_device_reduce|quick_?reduce|all_?(?:reduce|gather|to_?all)|reduce_?scatter|(?:one|two)_?shot"
    r"|(?:deep_ep|dpsk::ep)::(?:intranode|internode)|dcp_a2a|gather_multimem|userbuffers_)",
    re.IGNORECASE,
)

# Kinds whose arithmetic type is spelt in the library's own code; the others show it as a template argument.
_MATRIX_KINDS = frozenset({"gemm", "conv", "attention", "moe"})

# Wrappers say nothing themselves: the meaning is in their first template argument.
_WRAPPERS = frozenset({"Kernel", "Kernel2", "device_kernel", "kentry", "kernel", "enable_sm90_or_later"})

# Families of generic kernels in which the functor among the template arguments is the operation.
_FUNCTOR_FAMILIES = re.compile(r"elementwise|reduce_kernel|multi_tensor_apply|^index_.*_kernel$|trampoline")
_FUNCTOR = re.compile(r"\b(?!gpu_kernel_impl)\w*(?:Functor|Ops|_kernel_cuda|_kernel_impl|_kernel|KernelImpl)\w*")

_CASTS = re.compile(r"\((?:unsigned )?(?:int|bool|long|long long|char|short)\)")
_RETURN_TYPE = re.compile(r"^(?:static |inline )*(?:void|(?:std::)?enable_if<.*?>::type)\s+(?=\S)")
_SUFFIXES = re.compile(r"(?: \[clone [^\]]*\]|\.kd)+$")
_TYPES = re.compile(
    r"(?P<bf16>bfloat16|bf16)|(?P<fp8>float8|e4m3|e5m2)|(?P<fp16>(?<![a-z])(?:__)?half(?:_t)?(?![a-z])|fp16)"
    r"|(?P<fp64>(?<![a-z])double(?![a-z]))|(?P<fp32>(?<![a-z])float[248]?(?![a-z0-9]))"
)
_MANGLED_LITERAL = re.compile(r"L[a-z]n?\d+E")
_NAME_LENGTH = re.compile(r"\d+")
# A type name such as int or float is an argument of a template, not what it wraps.
_IDENTIFIER = re.compile(r"(?!(?:int|long|bool|char|float|double|unsigned|void|true|false|__half)$)[A-Za-z_]\w*$")
_BRACKETS = re.compile(r"[<>()]")

# A few template libraries write names of several kB; what tells the kind stands at the front.
_MAX_SUBJECT = 800


class KernelClass(NamedTuple):
    """``precision`` is that of the arithmetic (fp64, fp32, tf32, fp16, bf16, fp8, fp4, int8), not of storage.

    ``library`` is whose code it is (cublas, cutlass, flash-attn, aten, …), which another library may have called.
    ``precision``, ``tensor_cores`` and ``library`` are None where the name does not say.
    """

    kind: str
    precision: str | None
    tensor_cores: bool | None
    library: str | None = None

    @property
    def fp32_gemm(self) -> bool:
        """A matrix product in FP32 on the ordinary pipe, also with a vector. False when in doubt: TF32 kernels have similar
        names, and of vector kernels only cuBLAS's name the type of the weights, which may be quantised in others."""
        if self.precision != "fp32" or self.tensor_cores is not False:
            return False
        return self.kind == "gemm" or (self.kind == "gemv" and self.library == "cublas")


class _Pattern(NamedTuple):
    value: str
    tensor_cores: bool | None
    expression: re.Pattern[str]


def classify(names: Sequence[str]) -> list[KernelClass]:
    """The class of each kernel name, in order."""
    return [_classify(name) for name in names]


@lru_cache(maxsize=65536)
def is_communication(name: str) -> bool:
    """Whether the kernel moves data between devices: NCCL and its kin, custom all-reduce, NVSHMEM."""
    return _COMMUNICATION.search(name) is not None


@lru_cache(maxsize=65536)
def short_name(name: str, width: int = 60) -> str:
    """A name for display, at most ``width`` characters.

    No return type, namespaces, template arguments or parameters; the inside of wrappers, the tile sizes that tell
    GEMM kernels apart, and the functor of generic kernels (``vectorized_elementwise_kernel<FillFunctor>``) stay.
    """
    short = base_name(name)
    inner = inner_name(name)
    if inner is not None:
        short = inner
    elif short in _WRAPPERS and "::" in (outside := _outside_templates(_head(name))):
        # gemvx::kernel: the bare name tells nothing, its namespace does.
        short = "::".join(outside.split("::")[-2:])
    elif _FUNCTOR_FAMILIES.search(short):
        functor = _functor(_head(name), short)
        short = f"{short}<{functor}>" if functor else short
    return short if len(short) <= width else short[: width - 1] + "…"


@lru_cache(maxsize=65536)
def base_name(name: str) -> str:
    """The function's own name, as nsys and Nsight Compute call it: no namespace, template or parameters."""
    if name.startswith("_Z"):
        own, _ = _mangled_parts(name)
        return own[-1] if own else name
    head = _head(name)
    outside = _outside_templates(head)
    return outside.rpartition("::")[2].strip() or head or name


@lru_cache(maxsize=65536)
def inner_name(name: str) -> str | None:
    """What a wrapper such as ``cutlass::Kernel2<…>`` wraps; None when the kernel is no wrapper."""
    if base_name(name) not in _WRAPPERS:
        return None
    if name.startswith("_Z"):
        _, arguments = _mangled_parts(name)
        return arguments[0] if arguments else None
    head = _head(name)
    start = head.find("<", head.find(base_name(name)))
    while start >= 0:
        inside = head[start + 1 :]
        identifier = _outside_templates(_first_argument(inside)).rpartition("::")[2].strip()
        if identifier not in _WRAPPERS:
            return identifier if _IDENTIFIER.match(identifier) else None
        start = head.find("<", start + 1)
    return None


@lru_cache(maxsize=65536)
def _classify(name: str) -> KernelClass:
    subject = _subject(name)
    library = next((p.value for p in _patterns("library") if p.expression.search(subject)), None)
    if is_communication(name):
        return KernelClass("communication", None, None, library)
    kind = next((p.value for p in _patterns("kind") if p.expression.search(subject)), "other")
    if kind in _MATRIX_KINDS:
        for pattern in _patterns("precision"):
            if pattern.expression.search(subject):
                return KernelClass(kind, pattern.value, pattern.tensor_cores, library)
    tensor_cores = False if kind == "gemv" else None
    return KernelClass(kind, _first_type(name, subject), tensor_cores, library)


def _subject(name: str) -> str:
    """What patterns are matched against: lower case, without return type, casts and parameters."""
    if name.startswith("_Z"):
        own, arguments = _mangled_parts(name)
        return "::".join(own + arguments).casefold()[:_MAX_SUBJECT]
    # A cache type of (Fp8KVCacheDataType)0 means "as the model", not FP8.
    return _head(name).casefold().replace("fp8kvcachedatatype", "kvcachedatatype")[:_MAX_SUBJECT]


def _first_type(name: str, subject: str) -> str | None:
    if name.startswith("_Z"):
        for code, precision in (("DF16b", "bf16"), ("DF16_", "fp16")):
            if code in name:
                return precision
    match = _TYPES.search(subject)
    return None if match is None else match.lastgroup


def _head(name: str) -> str:
    """The name without return type, anonymous namespaces, casts, suffixes and parameter list."""
    text = _SUFFIXES.sub("", name.strip()).replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    text = _RETURN_TYPE.sub("", _CASTS.sub("", text))
    depth = 0
    for match in _BRACKETS.finditer(text):
        bracket = match.group()
        if bracket == "<":
            depth += 1
        elif bracket == ">":
            # The arrow of a trailing return type closes nothing.
            depth -= text[match.start() - 1] != "-"
        elif bracket == "(" and depth == 0:
            return text[: match.start()].strip()
    return text


def _outside_templates(text: str) -> str:
    """``a::b<c>::d<e>`` to ``a::b::d``."""
    kept = []
    depth = 0
    position = 0
    for match in re.finditer("[<>]", text):
        if depth == 0:
            kept.append(text[position : match.start()])
        depth = max(0, depth + (1 if match.group() == "<" else -1))
        position = match.end()
    if depth == 0:
        kept.append(text[position:])
    return "".join(kept)


def _first_argument(text: str) -> str:
    """The first template argument of ``text``, which starts inside the bracket."""
    depth = 0
    for match in re.finditer("[<>,()]", text):
        sign = match.group()
        if depth == 0 and sign in ",>":
            return text[: match.start()]
        depth += {"<": 1, "(": 1, ">": -1, ")": -1, ",": 0}[sign]
    return text


def _functor(head: str, base: str) -> str | None:
    """The operation of a generic kernel: the first identifier among its template arguments that names one."""
    arguments = head[head.find(base) + len(base) :]
    match = re.search(_FUNCTOR, arguments)
    return match.group() if match else None


def _mangled_parts(name: str) -> tuple[list[str], list[str]]:
    """The identifiers of an Itanium-mangled name: those of the function's own name, and those of its arguments."""
    text = _MANGLED_LITERAL.sub("", name[2:])
    own: list[str] = []
    arguments: list[str] = []
    position = 1 if text.startswith("N") else 0
    in_name = True
    while match := _NAME_LENGTH.search(text, position):
        in_name = in_name and match.start() == position
        length = int(match.group())
        identifier = text[match.end() : match.end() + length]
        position = match.end() + length
        if identifier.startswith("_GLOBAL__"):
            continue
        if in_name and (text[0] == "N" or not own):
            own.append(identifier)
        else:
            arguments.append(identifier)
    return own, arguments


@lru_cache(maxsize=3)
def _patterns(table: str) -> tuple[_Pattern, ...]:
    text = (resources.files(__package__) / "kernel_patterns.tsv").read_text(encoding="utf-8")
    records = csv.DictReader(text.splitlines(), delimiter="\t", quoting=csv.QUOTE_NONE)
    said = {"yes": True, "no": False, "": None}
    return tuple(
        _Pattern(record["value"], said[record["tensor_cores"]], re.compile(record["pattern"]))
        for record in records
        if record["table"] == table
    )
