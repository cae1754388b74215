"""The executor of PTX on its own: kernels with a defect, each of which is found, and some without.

The defects of ``test_steps.py`` are in fastopt itself.
"""

import ctypes

import numpy as np
import pytest

from ptx.executor import build_driver, compile_kernel, needs_compiler
from ptx.translate import UnknownInstruction, translate

pytestmark = needs_compiler

WORDS = 64
KERNEL = """
.version 8.0
.target sm_80
.address_size 64
.shared .align 4 .b8 words[{size}];
.visible .entry kernel(
    .param .u64 kernel_out, .param .u64 kernel_fresh, .param .u64 kernel_freed
)
{{
    .local .align 4 .b8 depot[16];
    .reg .b32 %r<9>;
    .reg .b64 %rd<19>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [kernel_out];
    ld.param.u64 %rd2, [kernel_fresh];
    ld.param.u64 %rd3, [kernel_freed];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd4, %r1, 4;
    add.s64 %rd5, %rd1, %rd4;  // the thread's word of the result,
    mov.u64 %rd6, words;
    add.s64 %rd7, %rd6, %rd4;  // its word of shared memory,
    sub.s64 %rd8, %rd6, %rd4;  // and that of the opposite thread
    setp.lt.u32 %p1, %r1, 32;
    {body}
    ret;
}}
"""
"""Gets {WORDS} words of zeros, as many that were not written, and as many that were freed."""

REVERSED = """st.shared.u32 [%rd7], %r1;
    {barrier}
    ld.shared.u32 %r2, [%rd8+252];
    st.global.u32 [%rd5], %r2;"""
SUMMED = "mov.u32 %r2, %r1; mov.b32 %r3, 31; mov.b32 %r4, -1;" + "".join(
    f"shfl.sync.bfly.b32 %r5|%p2, %r2, {distance}, %r3, %r4; add.s32 %r2, %r2, %r5;"
    for distance in (16, 8, 4, 2, 1)
)
RIGHT = {
    "words are reversed": (REVERSED.format(barrier="bar.sync 0;"), np.arange(WORDS)[::-1]),
    "a warp is summed": (
        SUMMED + "st.global.u32 [%rd5], %r2;",
        np.repeat([sum(range(32)), sum(range(32, 64))], 32),
    ),
    "threads are counted": (
        "bar.red.popc.u32 %r2, 0, %p1; st.global.u32 [%rd5], %r2;",
        np.full(WORDS, 32),
    ),
    "lanes wait": (
        """and.b32 %r2, %r1, 31; setp.eq.s32 %p2, %r2, 0;
        @%p2 st.shared.u32 [%rd7], 7; bar.warp.sync -1;
        and.b32 %r2, %r1, 32; mul.wide.u32 %rd9, %r2, 4; add.s64 %rd9, %rd6, %rd9;
        ld.shared.u32 %r3, [%rd9]; st.global.u32 [%rd5], %r3;""",
        np.full(WORDS, 7),
    ),
    "all write one value": ("st.global.u32 [%rd1], 0; st.global.u32 [%rd5+0], 0;", np.zeros(WORDS)),
}
BOUNDS, UNWRITTEN = "access outside of allocated memory", "read of memory that was not written"
MISSED = "a barrier that not all threads reach"
DEFECTS = [
    (BOUNDS, "an index is too large", "st.global.u32 [%rd5+4], 1;"),
    (BOUNDS, "an index is negative", "ld.global.u32 %r2, [%rd5+-4];"),
    ("misaligned access", "a vector", "ld.global.v2.u32 {%r2, %r3}, [%rd5];"),
    ("access to freed memory", "", "ld.global.u32 %r2, [%rd3];"),
    (UNWRITTEN, "global", "ld.global.u32 %r2, [%rd2];"),
    (UNWRITTEN, "shared", "ld.shared.u32 %r2, [%rd7];"),
    (UNWRITTEN, "local", "mov.u64 %rd9, depot; ld.local.u32 %r2, [%rd9+4];"),
    (
        *(BOUNDS, "local memory is that of another thread"),
        """mov.u64 %rd9, depot; st.local.u32 [%rd9], 1;
        and.b64 %rd10, %rd4, 0; add.s64 %rd10, %rd6, %rd10;
        setp.eq.s32 %p2, %r1, 0; @%p2 st.shared.u64 [%rd10], %rd9; bar.sync 0;
        ld.shared.u64 %rd11, [%rd10]; ld.u32 %r2, [%rd11];""",
    ),
    (UNWRITTEN, "a barrier is missing", REVERSED.format(barrier="")),
    (
        *("race", "lanes wait instead of warps"),
        "st.shared.u32 [%rd7], 1; bar.warp.sync -1;"
        + REVERSED.format(barrier="bar.sync 0;")
        + "ld.shared.u32 %r2, [%rd8+252]; bar.warp.sync -1; st.shared.u32 [%rd7], 99;",
    ),
    ("race", "threads write one word", "st.global.u32 [%rd1], %r1;"),
    ("race", "another thread's word", "st.global.u32 [%rd5], 5; ld.global.u32 %r2, [%rd1];"),
    (MISSED, "threads have ended", "@%p1 bra SKIP; bar.sync 0; SKIP:"),
    (MISSED, "another one", "@%p1 bra OTHER;\n bar.sync 0; bra END;\n OTHER: bar.sync 0; END:"),
    (
        *("lanes wait for each other at different places", "shuffles"),
        f"setp.lt.u32 %p1, %r1, 16; @%p1 bra OTHER;\n {SUMMED} bra END;\n OTHER: {SUMMED} END:",
    ),
    (
        *("lanes wait for one that has ended", "a shuffle"),
        f"setp.lt.u32 %p1, %r1, 16; @%p1 bra SKIP; {SUMMED} SKIP:",
    ),
    ("a lane is not in its own mask", "", "bar.warp.sync 1;"),
    (
        *("shuffle from a lane that does not take part", ""),
        """@!%p1 bra END; setp.lt.u32 %p1, %r1, 16; @!%p1 bra END; mov.b32 %r3, 31;
        mov.b32 %r4, 65535; shfl.sync.bfly.b32 %r5|%p2, %r1, 16, %r3, %r4; END:""",
    ),
]
"""Messages, which of several defects have them, and their code."""


def text_of(body, size=4 * WORDS):
    return KERNEL.format(size=size, body=body)


@pytest.fixture(scope="module", params=[0, 1], ids=["in order", "in reverse"])
def driver(folder, request):
    loaded = ctypes.CDLL(str(build_driver(folder / str(request.param))))
    loaded.executor_message.restype = ctypes.c_char_p
    loaded.executor_set(1, request.param)
    return loaded


def allocated(driver):
    address = ctypes.c_uint64()
    assert driver.cuMemAlloc(ctypes.byref(address), ctypes.c_size_t(4 * WORDS)) == 0
    return address


def run(driver, folder, text):
    """Run a kernel by 64 threads; return the words that it wrote, or the executor's message."""
    library, kernel, words = ctypes.c_uint64(), ctypes.c_uint64(), np.zeros(WORDS, np.uint32)
    path, size = str(compile_kernel(text, folder)).encode(), ctypes.c_size_t(4 * WORDS)
    assert driver.cuLibraryLoadData(ctypes.byref(library), path, *[None] * 6) == 0
    assert driver.cuLibraryGetKernel(ctypes.byref(kernel), library, b"kernel") == 0
    out, fresh, freed = (allocated(driver) for _ in range(3))
    assert driver.cuMemFree(freed) == 0
    assert driver.cuMemFree(freed) != 0
    assert driver.cuMemcpyHtoD(out, words.ctypes.data_as(ctypes.c_void_p), size) == 0
    values = (ctypes.c_void_p * 3)(*map(ctypes.addressof, (out, fresh, freed)))
    if driver.cuLaunchKernel(kernel, 1, 1, 1, WORDS, 1, 1, 0, ctypes.c_uint64(), values, None):
        return driver.executor_message().decode()
    assert driver.cuMemcpyDtoH(words.ctypes.data_as(ctypes.c_void_p), out, size) == 0
    return words.tolist()


@pytest.mark.parametrize("name", RIGHT)
def test_right_kernels_compute_what_they_should(name, driver, folder):
    body, expected = RIGHT[name]
    assert run(driver, folder, text_of(body)) == list(expected)


@pytest.mark.parametrize(("words", "which", "body"), DEFECTS)
def test_a_defect_is_found(words, which, body, driver, folder):
    assert f" of the PTX: {words}" in str(run(driver, folder, text_of(body)))


def test_a_message_names_the_line_and_the_thread(driver, folder):
    text = text_of("setp.eq.s32 %p2, %r1, 7; @%p2 ld.global.u32 %r2, [%rd2];")
    line = 1 + text[: text.index("@%p2")].count("\n")
    message = run(driver, folder, text)
    assert message.startswith(f"line {line} of the PTX: ")
    assert message.endswith(", block 0, thread (7, 0)")


UNKNOWN = "atom.global.add.u32 %r2, [%rd1], 1", "add.sat.s32 %r1, %r1, 1"


@pytest.mark.parametrize("instruction", UNKNOWN)
def test_an_unknown_instruction_is_an_error_with_its_line(instruction):
    text = text_of(instruction + ";")
    line = 1 + text[: text.index(instruction)].count("\n")
    with pytest.raises(UnknownInstruction, match=f"^line {line}: {instruction[:9]}"):
        translate(text)
