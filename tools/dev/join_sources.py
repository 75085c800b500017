"""Join mmcv's C++ sources into a few large files, so that torch's headers are read 6 times instead of 78.

    join_sources.py FOLDER      an unpacked source archive of mmcv or onedl-mmcv; changed in place

Most of the time of mmcv's CPU build goes into these headers.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Files that define what others define too (``PreCalc``, ``add``) are compiled separately. ``psamask`` defines macros
# named ``min`` and ``max``, so that it comes last in its file.
SEPARATE = (('roi_align', 'psamask'), ('roi_align_rotated',), ('rotated_feature_align',), ('bezier_align',))


def join(folder: Path, name: str, sources: list[Path]) -> None:
    """Write a file that includes the sources, which are renamed so that the build does not find them again."""
    included = [source.rename(source.with_suffix('.inc')) for source in sources]
    lines = [f'#include "{path.name}"\n' for path in included]
    (folder / f'{name}.cpp').write_text(''.join(lines))


def main() -> None:
    """Join the files that register operators, and those of the CPU operators."""
    host = Path(sys.argv[1]) / 'mmcv' / 'ops' / 'csrc' / 'pytorch'
    cpu = host / 'cpu'
    join(host, 'all_operators', sorted(host.glob('*.cpp')))
    separate = {name for names in SEPARATE for name in names}
    join(cpu, 'all_cpu_operators', [path for path in sorted(cpu.glob('*.cpp')) if path.stem not in separate])
    for names in SEPARATE:
        join(cpu, f'all_{names[0]}', [cpu / f'{name}.cpp' for name in names if (cpu / f'{name}.cpp').exists()])


if __name__ == '__main__':
    main()
