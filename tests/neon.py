"""Run generated C as code for 64-bit ARM (NEON) in an emulator.

`PYTHONPATH=src:tests python tests/neon.py 100` checks 100 random statements over sparse operands, pruned and sparse
convolutions and kernel maps; `python tests/neon.py pytest tests/lower/test_nest.py` runs tests so. Needs the packages
unicorn (an emulator of CPUs, on which the host's memory has its own addresses) and ziglang (a cross-compiler).
"""

from __future__ import annotations

import ctypes
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import unicorn
from unicorn import arm64_const as arm

import pumice  # noqa: F401 (all modules that start threads)
from pumice.runtime import native

ZIG = (sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl")
FLAGS = ("-O2", "-ffp-contract=fast", "-fno-math-errno", "-ffreestanding", "-fno-stack-protector", "-fno-sanitize=all")
LINKED = ("-nostdlib", "-static", "-fno-pie", "-Wl,--entry=0", "-Wl,--no-gc-sections", "-mno-outline-atomics")
PAGE, SPACE, STACK = 4096, 1 << 24, 1 << 20
_MEMORY = """__attribute__((no_builtin)) void *memcpy(void *to, const void *from, unsigned long n) {
    for (unsigned long k = 0; k < n; k++) ((char *)to)[k] = ((const char *)from)[k];
    return to;
}
__attribute__((no_builtin)) void *memset(void *to, int value, unsigned long n) {
    for (unsigned long k = 0; k < n; k++) ((char *)to)[k] = value;
    return to;
}
"""
FIRST = 1 << 33  # Address of the first library; nothing of the host lies there
RETURN = FIRST - PAGE
_X = [getattr(arm, f"UC_ARM64_REG_X{n}") for n in range(31)]


class Machine:
    """An emulated CPU. Pages of the host are mapped at their own addresses when they are first read or written."""

    def __init__(self) -> None:
        self.cpu = unicorn.Uc(unicorn.UC_ARCH_ARM64, unicorn.UC_MODE_ARM)
        self.cpu.mem_map(RETURN, PAGE)
        self._stack, self._next = FIRST - PAGE - STACK, FIRST
        self.cpu.mem_map(self._stack, STACK)
        access = unicorn.UC_HOOK_MEM_READ_UNMAPPED | unicorn.UC_HOOK_MEM_WRITE_UNMAPPED
        self.cpu.hook_add(access, self._map)
        # NEON is off after a reset.
        self.cpu.reg_write(arm.UC_ARM64_REG_CPACR_EL1, 3 << 20)

    def _map(self, cpu: Any, _: int, address: int, size: int, *__: Any) -> bool:
        for page in range(address // PAGE, (address + size - 1) // PAGE + 1):
            try:
                cpu.mem_map_ptr(page * PAGE, PAGE, unicorn.UC_PROT_ALL, page * PAGE)
            except unicorn.UcError:
                continue
        return True

    def load(self, image: bytes, base: int) -> None:
        """Load the segments of an executable that is linked for `base`."""
        (first,), (size, count) = struct.unpack_from("<Q", image, 32), struct.unpack_from("<HH", image, 54)
        self.cpu.mem_map(base, SPACE)
        for n in range(count):
            kind, _, offset, address, _, filed, _, _ = struct.unpack_from("<IIQQQQQQ", image, first + n * size)
            if kind == 1:
                self.cpu.mem_write(address, image[offset : offset + filed])

    def room(self) -> int:
        """The base for the next library."""
        self._next += SPACE
        return self._next

    def call(self, address: int, numbers: Sequence[int]) -> int:
        stack = self._stack + STACK - PAGE
        for register, number in zip(_X[:8], numbers, strict=False):
            self.cpu.reg_write(register, number & (1 << 64) - 1)
        rest = numbers[8:]
        self.cpu.mem_write(stack, struct.pack(f"<{len(rest)}q", *rest))
        self.cpu.reg_write(arm.UC_ARM64_REG_SP, stack)
        self.cpu.reg_write(arm.UC_ARM64_REG_X30, RETURN)
        self.cpu.emu_start(address, RETURN)
        return self.cpu.reg_read(arm.UC_ARM64_REG_X0)


@lru_cache(maxsize=1)
def machine() -> Machine:
    return Machine()


class Function:
    """A function of an emulated library, as one of ctypes."""

    def __init__(self, address: int) -> None:
        self._as_parameter_, self.argtypes, self.restype = address, None, ctypes.c_int

    def __call__(self, *given: Any) -> Any:
        found = machine().call(self._as_parameter_, [_number(x) for x in given])
        return None if self.restype is None else self.restype(found).value


def _number(x: Any) -> int:
    if isinstance(x, ctypes.Array):
        return ctypes.addressof(x)
    return int(getattr(x, "value", x) or 0)


class Library:
    """A library in the emulator, as ctypes.CDLL."""

    def __init__(self, image: bytes, base: int) -> None:
        machine().load(image, base)
        self._symbols = dict(_symbols(image))

    def __getitem__(self, name: str) -> Function:
        found = Function(self._symbols[name])
        setattr(self, name, found)
        return found

    def __getattr__(self, name: str) -> Function:
        if name.startswith("_") or name not in self._symbols:
            raise AttributeError(name)
        return self[name]


def _symbols(image: bytes) -> Any:
    (start,), (size, count) = struct.unpack_from("<Q", image, 40), struct.unpack_from("<HH", image, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", image, start + n * size) for n in range(count)]
    for _, kind, _, _, offset, length, link, *_ in sections:
        if kind == 2:
            names = sections[link][4]
            for at in range(offset, offset + length, 24):
                name, _, _, _, address, _ = struct.unpack_from("<IBBHQQ", image, at)
                begin = names + name
                yield image[begin : image.index(b"\0", begin)].decode(), address


class Compiler(native.Compiler):
    """Compiles for NEON; its libraries run in the emulator, on one thread."""

    def library(self, source: str) -> Any:
        base = machine().room()
        with tempfile.TemporaryDirectory() as folder:
            text, made = Path(folder, "source.c"), Path(folder, "made")
            text.write_text(native._PREAMBLE + _MEMORY + source, encoding="utf-8")
            command = [*ZIG, *FLAGS, *LINKED, f"-Wl,--image-base={base:#x}", "-o", str(made), str(text)]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise AssertionError(done.stderr[-2000:])
            return Library(made.read_bytes(), base)


def emulate() -> None:
    """Compile for the emulator from here on in this process."""
    macros = subprocess.run([*ZIG, "-dM", "-E", "-x", "c", "/dev/null"], capture_output=True, text=True, check=True)
    made = Compiler(ZIG, macros.stdout)
    assert made.vector == (4, 32), made.vector
    native.Compiler.find = staticmethod(lambda: made)  # type: ignore[method-assign]
    threaded = native.parallel_region
    for module in [*sys.modules.values()]:
        if getattr(module, "parallel_region", None) is threaded:
            module.parallel_region = lambda: 0  # type: ignore[attr-defined]
    assert native.compiler() is made, native.compiler()


if __name__ == "__main__":
    emulate()
    if sys.argv[1] == "pytest":
        import pytest

        options = ["-p", "no:cacheprovider", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        raise SystemExit(pytest.main([*options, *sys.argv[2:]]))
    import sanitized

    wanted = int(sys.argv[1])
    sanitized.statements(wanted)
    sanitized.convolutions(wanted // 4)
    print(f"{wanted} statements and {wanted // 4} layers of both kinds")
