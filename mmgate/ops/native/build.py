"""Compile mmgate's C++ CPU kernels into this folder, once a machine: ``python -m mmgate.doctor --build``.

It takes the C++ compiler that ``CXX`` names, else ``c++``, ``g++`` or ``clang++``, and no header or library of torch:
one library serves every torch. It is compiled for the instructions of this processor, which its name tells, as machines
of a cluster share their folders. An import never compiles. ``MMGATE_NATIVE`` names another file for the library.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

SOURCES = Path(__file__).parent / 'cpp'
COMPILERS = ('c++', 'g++', 'clang++')
FLAGS = '-std=c++17 -O3 -fPIC -fvisibility=hidden -pthread -fno-math-errno -fno-trapping-math -fno-signed-zeros'
FLAGS += ' -ffp-contract=fast'
PROCESSOR = Path('/proc/cpuinfo')
INSTRUCTIONS = ('flags', 'features', 'isa', 'cpu')  # names of the lines of PROCESSOR that tell them
logger = logging.getLogger('mmgate')


def library() -> Path:
    """Return the path of the compiled library, whether it is there or not."""
    machine = f'{platform.system()}-{platform.machine()}-{processor()}'.lower()
    return Path(os.environ.get('MMGATE_NATIVE') or SOURCES / f'native-{machine}.so')


def built_from() -> str:
    """Return digests of the sources and of the processor; the library contains those that it was compiled for."""
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob('*.cpp'), *SOURCES.glob('*.h'))):
        digest.update(path.read_bytes())
    return f'{digest.hexdigest()[:16]} {processor()}'


@functools.cache
def processor() -> str:
    """Return a digest of the processor's instructions or, where Linux does not list them, of its name."""
    found = platform.processor()
    if PROCESSOR.is_file():
        with PROCESSOR.open() as lines:
            named = (line.partition(':') for line in lines)
            found = next((text for name, _, text in named if name.strip().lower() in INSTRUCTIONS), found)
    return hashlib.sha256(' '.join(sorted(found.split())).encode()).hexdigest()[:8]


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler, or None if there is none."""
    found = [os.environ.get('CXX') or '', *(shutil.which(name) or '' for name in COMPILERS)]
    return next((shlex.split(command) for command in found if command), None)


def build(flags: str = '') -> Path:
    """Compile the kernels and return the library's path; ``flags`` are further options of the compiler.

    Raises:
        RuntimeError: There is no compiler, or it fails; the message has the compiler's.
    """
    command = compiler()
    if command is None:
        raise RuntimeError(f'there is no C++ compiler: none of {", ".join(COMPILERS)} is on the path, and CXX is empty')
    target = library()
    part = target.with_name(f'{target.name}.{os.getpid()}')
    files = ['-shared', *map(str, sorted(SOURCES.glob('*.cpp'))), '-o', str(part)]
    if platform.system() == 'Linux':
        files.append('-ldl')
    options = [*shlex.split(FLAGS), f'-DMMGATE_BUILT_FROM="{built_from()}"']
    more = [*shlex.split(flags), *files]
    try:
        try:
            _run([*command, *options, '-march=native', *more])
        except RuntimeError:
            _run([*command, *options, *more])
            logger.warning(f'{command[0]} does not compile with -march=native: the kernels use common instructions.')
        # Another process, which may have loaded the old file, sees the whole new one or the old one.
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    return target


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise RuntimeError(f'{command[0]} does not run: {error}') from error
    if done.returncode:
        raise RuntimeError(f'{command[0]} fails:\n{done.stderr[-3000:]}')
