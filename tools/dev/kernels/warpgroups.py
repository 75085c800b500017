"""Scan a listing of Hopper's machine code for registers that are touched while a warpgroup product still uses them.

HGMMA runs asynchronously: until a WARPGROUP.DEPBAR has waited for its group, no other instruction may read or write its
accumulator, or write its operand in registers. The assembler has to ensure it. If it does not, a kernel is wrong at
times, which no interpreter shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

Instructions = list[tuple[int, str]]


def hazards(instructions: Instructions) -> list[str]:
    """Return a line for each instruction that touches registers of products in flight; loops are followed twice.

    Args:
        instructions: Addresses and texts of a kernel's instructions, as ``cuobjdump -sass`` prints them.
    """
    found = dict[str, None]()
    flying: list[tuple[set[int], set[int]]] = []  # accumulator and operand of each product since the last wait
    groups: list[int] = []  # how many products were in flight when a group of them was closed
    for at, text in _trace(instructions):
        if text.startswith('WARPGROUP.DEPBAR'):
            pending = int(text.rsplit(',', 1)[1], 16)
            while len(groups) > pending:
                done = groups.pop(0)
                flying = flying[done:]
                groups = [count - done for count in groups]
            continue
        written, read = _registers(text)
        product = 'HGMMA' in text
        for accumulator, operand in flying:
            # products of one accumulator follow each other in order
            if (read | (set() if product else written)) & accumulator or written & operand:
                found[f'{at:04x} {text}'] = None
        if product:
            flying.append((written, read))
            if 'gsb0' in text:
                groups.append(len(flying))
    return list(found)


def _trace(instructions: Instructions) -> Iterator[tuple[int, str]]:
    """Yield the instructions in order, and those of a loop a second time after its branch."""
    places = {at: index for index, (at, _) in enumerate(instructions)}
    for index, (at, text) in enumerate(instructions):
        yield at, re.sub(r'^@!?\w+\s+', '', text)
        target = re.search(r'\bBRA\b.*?0x([0-9a-f]+)', text)
        start = places.get(int(target[1], 16), index) if target else index
        if start < index:
            yield from ((place, re.sub(r'^@!?\w+\s+', '', inner)) for place, inner in instructions[start:index])


def _registers(text: str) -> tuple[set[int], set[int]]:
    """Return the registers that an instruction writes and reads; a product reads no accumulator but its own."""
    opcode, _, rest = text.partition(' ')
    operands = [operand.strip() for operand in rest.split(',')]
    if opcode.startswith('HGMMA'):
        columns = int(re.search(r'x(\d+)x', opcode)[1])  # type: ignore[index]
        return _span(operands[0], columns // 2), _span(operands[1], 4) if operands[1].startswith('R') else set()
    stores = re.match(r'ST|RED|ATOM|BAR|BRA|EXIT|LDGSTS|UTMA|SYNCS', opcode) is not None
    width = re.search(r'\.(128|64|M88\.4|M88\.2|WIDE)', opcode)
    size = {'128': 4, 'M88.4': 4}.get(width[1], 2) if width else 1
    written: set[int] = set()
    read: set[int] = set()
    for index, operand in enumerate(operands):
        factor = 'WIDE' in opcode and index in (1, 2)  # of two words are the product and what is added to it
        for name in re.findall(r'\bR\d+(?:\.64)?', operand):
            words = 2 if name.endswith('.64') else 1 if '[' in operand or factor else size
            (written if index == 0 and not stores else read).update(_span(name, words))
    return written, read


def _span(name: str, size: int) -> set[int]:
    match = re.match(r'R(\d+)', name)
    return set(range(int(match[1]), int(match[1]) + size)) if match else set()
