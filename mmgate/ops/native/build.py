"""Compile mmgate's C++ CPU kernels into this folder, once: ``python -m mmgate.doctor --build``.

It takes the C++ compiler that ``CXX`` names, else ``c++``, ``g++`` or ``clang++``, and no header or library of torch:
one library serves every torch. An import never compiles. ``MMGATE_NATIVE`` names another file for the library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / 'cpp'
COMPILERS = ('c++', 'g++', 'clang++')
FLAGS = '-std=c++17 -O3 -fPIC -fvisibility=hidden -pthread -fno-math-errno -fno-trapping-math -fno-signed-zeros'
FLAGS += ' -ffp-contract=fast'
V3 = '-mavx -mavx2 -mfma -mbmi -mbmi2 -mf16c -mlzcnt -mmovbe'
V4 = f'{V3} -mavx512f -mavx512bw -mavx512cd -mavx512dq -mavx512vl'
KERNELS = ('deformable', 'softmax')
SETS = {'baseline': '', 'v3': V3, 'v4': V4}  # sets of instructions; a processor takes the last one that it has


def library() -> Path:
    """Return the path of the compiled library, whether it is there or not."""
    machine = f'{platform.system()}-{platform.machine()}'.lower()
    return Path(os.environ.get('MMGATE_NATIVE') or SOURCES / f'native-{machine}.so')


def sources() -> str:
    """Return a digest of the C++ sources; the library contains the digest of those that it was compiled from."""
    digest = hashlib.sha256()
    for path in sorted((*SOURCES.glob('*.cpp'), *SOURCES.glob('*.h'))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


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
    options = [*shlex.split(FLAGS), *shlex.split(flags)]
    with tempfile.TemporaryDirectory() as folder:

        def objects_of(name: str) -> list[str]:
            """Compile the kernels for one instruction set, such as x86-64-v3; return [] if the compiler lacks it."""
            kept = [*options, *SETS[name].split(), f'-DMMGATE_SET={name}']
            files = []
            for kernel in KERNELS:
                to = str(Path(folder, f'{kernel}-{name}.o'))
                try:
                    _run([*command, *kept, '-c', str(SOURCES / f'{kernel}.cpp'), '-o', to])
                except RuntimeError:
                    if name == 'baseline':
                        raise
                    return []
                files.append(to)
            return files

        names = list(SETS) if platform.machine().lower() in ('x86_64', 'amd64') else ['baseline']
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = dict(zip(names, pool.map(objects_of, names), strict=True))
        there = [f'-DMMGATE_HAS_{name.upper()}' for name, files in objects.items() if files]
        there.append(f'-DMMGATE_SOURCES="{sources()}"')
        parts = [file for files in objects.values() for file in files]
        part = target.with_name(f'{target.name}.{os.getpid()}')
        linked = ['-shared', str(SOURCES / 'native.cpp'), *parts, '-o', str(part)]
        try:
            _run([*command, *options, *there, *linked, *(['-ldl'] if platform.system() == 'Linux' else [])])
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
