"""Translation of kernels in PTX to C; see ``runtime.h`` for what the C code uses.

A kernel becomes a function that runs one thread until it ends or waits for others: then it returns,
and goes on behind a ``case`` when it is called again. A register is an element of an array of 64
bits, whatever its type: an instruction reads the low bits that its type has, and extends what it
writes. Functions are inlined where they are called. An instruction without a translation raises
:class:`UnknownInstruction`.
"""

import itertools
import re

INTEGER, REAL, BITS = "[su](?:16|32|64)", "f(?:32|64)", "b(?:16|32|64)|pred"
ANY = f"{INTEGER}|{REAL}|{BITS}"
SUMS = f"{INTEGER}|{REAL}|f16"  # of float16 are exact in float32, and then rounded once
ORDER = ("eq", "=="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")
UNORDERED = ("ne", "=="), ("lt", ">="), ("le", ">"), ("gt", "<="), ("ge", "<")
"""Comparisons that hold for a NaN are the opposite of those that do not."""
SIGNS = ("add", "+"), ("sub", "-"), ("mul", "*")
BITWISE = ("and", "&"), ("or", "|"), ("xor", "^")
WITHIN = "{b:u32} < 8 * sizeof {a}"

OPERATIONS = {
    **{rf"{name}(?:\.rn|\.lo)?\.(?P<to>{SUMS})": f"{{a}} {sign} {{b}}" for name, sign in SIGNS},
    **{rf"mul\.wide\.{x}32": (f"{x}64", f"{{a:{x}64}} * {{b:{x}64}}") for x in "su"},
    rf"mad\.lo\.(?P<to>{INTEGER})": "{a} * {b} + {c}",
    rf"fma\.rn\.(?P<to>{REAL})": "fused({a}, {b}, {c})",
    rf"fma\.kept\.(?P<to>{REAL})": "kept_fused({a}, {b}, {c})",
    rf"div(?:\.rn)?\.(?P<to>{REAL})": "{a} / {b}",
    rf"div\.(?P<to>{INTEGER})": "{b} ? {a} / {b} : -1",
    rf"rem\.(?P<to>{INTEGER})": "{b} ? {a} % {b} : {a}",
    rf"rcp\.rn\.(?P<to>{REAL})": "1 / {a}",
    r"rcp\.approx\.ftz\.(?P<to>f64)": "coarse(1 / {a})",
    rf"sqrt\.rn\.(?P<to>{REAL})": "sqrt({a})",
    rf"neg\.(?P<to>{INTEGER}|{REAL})": "-{a}",
    rf"abs\.(?P<to>{REAL})": "fabs({a})",
    rf"min\.(?P<to>{INTEGER})": "{a} < {b} ? {a} : {b}",
    rf"max\.(?P<to>{INTEGER})": "{a} > {b} ? {a} : {b}",
    rf"min\.(?P<to>{REAL})": "least({a}, {b})",
    rf"max\.(?P<to>{REAL})": "most({a}, {b})",
    **{rf"{name}\.(?P<to>{BITS})": f"{{a}} {sign} {{b}}" for name, sign in BITWISE},
    r"not\.(?P<to>pred)": "!{a}",
    rf"not\.(?P<to>{BITS})": "~{a}",
    rf"(?:shl\.(?P<to>{BITS})|shl\.(?P<also>u32))": WITHIN + " ? {a} << {b:u32} : 0",
    r"shr\.(?P<to>[ub](?:16|32|64))": WITHIN + " ? {a} >> {b:u32} : 0",
    r"shr\.(?P<to>s(?:16|32|64))": "{a} >> (" + WITHIN + " ? {b:u32} : 8 * sizeof {a} - 1)",
    r"bfi\.(?P<to>b32|b64)": "inserted({a}, {b}, {c:u32}, {d:u32}, 8 * sizeof {a})",
    r"prmt\.(?P<to>b32)": "permuted({a}, {b}, {c})",
    rf"selp\.(?P<to>{ANY})": "{c:pred} ? {a} : {b}",
    rf"mov\.(?P<to>{ANY})": "{a}",
    r"cvta(?:\.to)?\.(?:global|shared|local)\.(?P<to>u64)": "{a}",
    r"cvt\.(?P<to>[su](?:8|16|32|64))\.(?P<of>[su](?:8|16|32|64))": "{a}",
    rf"cvt\.rn\.(?P<to>{REAL})\.(?P<of>{INTEGER})": "{a}",
    r"cvt\.rzi\.(?P<to>s32)\.(?P<of>f32|f64)": "truncated({a})",
    rf"cvt\.rzi\.(?P<to>{REAL})\.(?P<of>{REAL})": "trunc({a})",
    r"cvt\.(?P<to>f32|f64)\.(?P<of>f16|f32)": "{a}",
    r"cvt\.rn\.(?P<to>f16|f32)\.(?P<of>f32|f64)": "{a}",
    **{rf"setp\.{name}\.(?P<of>{ANY})": ("pred", f"{{a}} {sign} {{b}}") for name, sign in ORDER},
    rf"setp\.ne\.(?P<of>{INTEGER}|{BITS})": ("pred", "{a} != {b}"),
    rf"setp\.ne\.(?P<of>{REAL})": ("pred", "{a} < {b} || {a} > {b}"),
    rf"setp\.equ\.(?P<of>{REAL})": ("pred", "!({a} < {b} || {a} > {b})"),
    **{
        rf"setp\.{name}u\.(?P<of>{REAL})": ("pred", f"!({{a}} {sign} {{b}})")
        for name, sign in UNORDERED
    },
    rf"setp\.nan\.(?P<of>{REAL})": ("pred", "!({a} == {a} && {b} == {b})"),
}
"""Instructions that compute one result: types of the result and of the operands, and C code."""

ACCESS = re.compile(
    r"(?P<op>ld|st)(?:\.(?P<space>global|shared|local|param))?(?:\.(?:cs|cg|ca|nc))?"
    r"(?:\.v[24])?\.(?P<kind>[subf](?:8|16|32|64))"
)
WAITS = {
    r"(?:bar|barrier)\.sync(?:\.aligned)?": ("BARRIER", ["number"]),
    r"bar\.red\.popc\.u32": ("COUNT", ["result", "number", "value"]),
    r"bar\.warp\.sync": ("WARP", ["mask"]),
    r"shfl\.sync\.bfly\.b32": ("SHUFFLE", ["result", "value", "distance", "bound", "mask"]),
}
"""Instructions that wait for other threads: state of the thread, and operands."""

THREAD = {
    f"%{name}.{axis}": f"t->{name}[{k}]"
    for name in ("tid", "ctaid", "ntid", "nctaid")
    for k, axis in enumerate("xyz")
} | {"%laneid": "t->lane"}

STATEMENT = re.compile(r"\s*(?:([$\w]+):|([{}])|((?:[^;{}]|\{[^;{}]*\})*;))")


class UnknownInstruction(ValueError):
    """An instruction that has no translation."""


def translate(text):
    """Return C code of a module of PTX, which has one entry."""
    text = re.sub(r"//[^\n]*", "", text)
    shared, size = {}, 0
    declared = r"\.shared\s+(?:\.align\s+\d+\s+)?\.b8\s+([$\w]+)\[(\d+)\];"
    for name, count in re.findall(declared, text):
        shared[name] = size
        size += -(-int(count) // 64) * 64
    entry = re.search(r"\.entry\s+([$\w]+)\s*\(([^)]*)\)[^{]*\{", text)
    names = re.findall(r"\.param\s+.*?([$\w]+)(?:\[\d+\])?\s*(?:,|$)", entry[2].strip())
    params = {name: k for k, name in enumerate(names)}
    kernel = _Kernel(params, shared)
    body = _inlined(_body(text, entry.end()), _functions(text))
    kernel.read(body, 1 + text.count("\n", 0, entry.end()))
    return "\n".join(
        [
            '#include "runtime.h"',
            "static void body(Thread *t) {",
            "u64 *r = t->r;",
            "switch (t->resume) { case 0:;",
            *kernel.code,
            "} t->state = DONE; }",
            f"const Kernel {entry[1]} = {{body, {len(params)}, {len(kernel.registers)}, "
            f"{kernel.local}, {size}}};",
        ]
    )


def _body(text, start):
    """Return the text up to the brace that ends an entry or a function."""
    return text[start : text.index("\n}", start) + 1]


def _functions(text):
    """Return the bodies of functions by name; their parameters become registers."""
    found = {}
    for head in re.finditer(r"\.func\s+(?:\([^)]*\)\s*)?([$\w]+)\s*\([^)]*\)\s*\{", text):
        body = re.sub(rf"\b{re.escape(head[1])}_param_", "param", _body(text, head.end()))
        found[head[1]] = body.replace("func_retval", "retval")
    return found


def _inlined(body, functions):
    """Replace calls of functions by their bodies, on one line, with registers of their own."""
    if not functions:
        return body
    count = itertools.count()

    def inlined(call):
        own, number = functions[call[1]], next(count)
        own = re.sub(r"\$L", f"$L{number}_", re.sub(r"%(?!param|retval)", f"%f{number}_", own))
        own = own.replace("fma.rn", "fma.kept")  # of the GPU's library, as a CPU's is exact too
        own = re.sub(r"\bret;", f"bra $LEND{number};", " ".join(own.split()))
        lines = "\n" * call[0].count("\n")
        return f"{own} $LEND{number}: {lines}"

    body = re.sub(r"call\.uni\s+(?:\([^)]*\),\s*)?([$\w]+),\s*\([^)]*\)\s*;", inlined, body)
    body = re.sub(r"st\.param\.(\w+)\s+\[(param\d+|retval\d+)\+0\],", r"mov.\1 %\2,", body)
    return re.sub(
        r"ld\.param\.(\w+)\s+([%\w]+),\s*\[(param\d+|retval\d+)(?:\+0)?\]", r"mov.\1 \2, %\3", body
    )


class _Operand:
    """Operand in a template: a number of a type, which the format may replace."""

    def __init__(self, kernel, text, kind):
        self.kernel, self.text, self.kind = kernel, text, kind

    def __format__(self, kind):
        return self.kernel.number(self.text, kind or self.kind)


class _Kernel:
    """C code of a kernel, instruction by instruction."""

    def __init__(self, params, shared):
        self.params, self.shared = params, shared
        self.code, self.registers, self.depots = [], {}, {}
        self.local = self.waits = self.line = 0

    def read(self, text, line):
        """Translate the statements of a body that begins at a line."""
        place = 0
        while found := STATEMENT.match(text, place):
            self.line = line + text.count("\n", 0, found.end())
            place = found.end()
            label, _, statement = found.groups()
            if label:
                self.code.append(f"{_label(label)}:;")
            elif statement:
                self.statement(" ".join(statement[:-1].split()))
        if rest := text[place:].strip():
            raise UnknownInstruction(f"line {self.line}: {rest[:60]}")

    def statement(self, text):
        if text.startswith(".local"):
            found = re.fullmatch(r"\.local (?:\.align \d+ )?\.b8 (\w+)\[(\d+)\]", text)
            self.depots[found[1]] = self.local
            self.local += -(-int(found[2]) // 64) * 64
        elif text and not text.startswith((".reg", ".param", ".pragma")):
            guard, opcode, listed = re.fullmatch(r"(?:@(\S+) )?([\w.:]+) ?(.*)", text).groups()
            operands = [part.strip() for part in re.split(r",(?![^{]*\})", listed)]
            code = self.instruction(opcode, operands)
            if code is None:
                raise UnknownInstruction(f"line {self.line}: {text}")
            code = f"t->executed++; {code}"
            if guard:
                sign, name = re.fullmatch("(!?)(.*)", guard).groups()
                code = f"if ({sign}{self.number(name, 'pred')}) {{ {code} }}"
            self.code.append(code)

    def instruction(self, opcode, operands):
        """Return C code, or None."""
        if opcode in ("bra", "bra.uni"):
            return f"goto {_label(operands[0])};"
        if opcode == "ret":
            return "t->state = DONE; return;"
        if found := ACCESS.fullmatch(opcode):
            return self.access(found, operands)
        for pattern, (state, names) in WAITS.items():
            if re.fullmatch(pattern, opcode):
                return self.wait(state, dict(zip(names, operands, strict=True)))
        if opcode.startswith("mov.") and "{" in "".join(operands):
            return self.pack(opcode[-2:], *operands)
        for pattern, template in OPERATIONS.items():
            if found := re.fullmatch(pattern, opcode):
                return self.operation(found.groupdict(), template, operands)
        return None

    def operation(self, kinds, template, operands):
        to, template = template if isinstance(template, tuple) else (None, template)
        to = to or kinds["to"] or kinds["also"]
        of = kinds.get("of") or to
        numbers = {
            letter: _Operand(self, text, of)
            for letter, text in zip("abcd", operands[1:], strict=False)
        }
        return self.assign(operands[0], to, template.format(**numbers))

    def pack(self, width, target, source):
        """Translate ``mov`` of a register from or to several."""
        several = (target if "{" in target else source).strip("{}").split(",")
        bits = int(width) // len(several)
        if "{" in source:
            parts = [f"(u64){self.number(x, f'u{bits}')}" for x in several]
            whole = " | ".join(f"{part} << {bits * k}" for k, part in enumerate(parts))
            return self.assign(target, f"u{width}", whole)
        shifted = [(x, f"whole >> {bits * k}") for k, x in enumerate(several)]
        code = "".join(self.assign(x, f"u{bits}", part) for x, part in shifted)
        return f"{{ u64 whole = {self.number(source, 'u64')}; {code}}}"

    def access(self, found, operands):
        kind, space = found["kind"], (found["space"] or "generic").upper()
        word = re.sub("[sf]", "u", kind) if kind[0] == "f" else kind
        where, listed = operands if found["op"] == "st" else operands[::-1]
        several = [part.strip() for part in listed.strip("{}").split(",")]
        base, offset = re.fullmatch(r"\[([%$\w]+)(?:\+(-?\d+))?\]", where).groups(default="0")
        arguments = f"v, sizeof v, {self.line}"
        if found["op"] == "st":
            values = ", ".join(self.number(x, word) for x in several)
            address = f"{self.number(base, 'u64')} + {offset}"
            return f"{{ {word} v[] = {{{values}}}; store(t, {space}, {address}, {arguments}); }}"
        if space == "PARAM":
            read = f"memcpy(v, (u8 *)t->values[{self.params[base]}] + {offset}, sizeof v)"
        else:
            read = f"load(t, {space}, {self.number(base, 'u64')} + {offset}, {arguments})"
        results = "".join(self.assign(x, word, f"v[{k}]") for k, x in enumerate(several))
        return f"{{ {word} v[{len(several)}]; {read}; {results} }}"

    def wait(self, state, operands):
        """Translate a wait for other threads; of barriers, the first."""
        if operands.get("number", "0") != "0":
            return None
        self.waits += 1
        result = operands.pop("result", None)
        code = [
            f"t->{name} = {self.number(operands[name], 'u32')};"
            for name in ("value", "distance", "bound", "mask")
            if name in operands
        ]
        code.append(f"t->line = {self.line}; t->state = {state}; t->resume = {self.waits};")
        code.append(f"return; case {self.waits}:;")
        if result:
            target, _, valid = result.partition("|")
            code.append(self.assign(target, "u32", "t->result"))
            if valid:
                code.append(self.assign(valid, "pred", "1"))
        return " ".join(code)

    def assign(self, name, kind, value):
        """Return C code that writes a number to a register."""
        if kind[0] == "f":
            return f"{self.register(name)} = to_{kind}({value});"
        return f"{self.register(name)} = (u64)({kind})({value});"

    def number(self, text, kind):
        """Return C code of the number of a type that an operand has."""
        text = text.strip()
        if text in THREAD:
            bits = THREAD[text]
        elif text.startswith("%"):
            bits = self.register(text)
        elif found := re.fullmatch(r"0[fd]([0-9A-Fa-f]+)", text):
            bits = f"0x{found[1]}ull"
        elif re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)", text):
            bits = f"{int(text, 0) & (1 << 64) - 1:#x}ull"
        elif text in self.depots:
            bits = f"(t->local.base + {self.depots[text]})"
        elif text in self.shared:
            bits = f"(t->machine->shared.base + {self.shared[text]})"
        else:
            raise UnknownInstruction(f"line {self.line}: operand {text}")
        return f"from_{kind}({bits})" if kind[0] == "f" else f"(({kind}){bits})"

    def register(self, name):
        if not re.fullmatch(r"%?\w+", name.strip()):
            raise UnknownInstruction(f"line {self.line}: operand {name}")
        return f"r[{self.registers.setdefault(name.strip(), len(self.registers))}]"


def _label(name):
    return re.sub(r"\W", "_", name)
