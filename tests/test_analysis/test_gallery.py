"""The report's page: whole in one file, right in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import cv2
import numpy as np
import pytest

from mmgate.analysis.report.gallery import Section, write_gallery

CHROMIUM = next(filter(None, map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome'))), None)
# What a page says of itself once it has loaded, written where --dump-dom shows it.
PROBE = """<script>
document.title = JSON.stringify([
  [...document.images].filter(i => i.complete && i.naturalWidth > 0).length,
  document.documentElement.scrollWidth <= document.documentElement.clientWidth,
  performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length])
</script>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    for name, width in (('small', 40), ('large', 1600)):
        cv2.imwrite(str(tmp_path / f'{name}.png'), np.full((30, width, 3), 128, np.uint8))
    pictures = [(tmp_path / 'small.png', 'one <small> & plain'), (tmp_path / 'large.png', 'x' * 300)]
    rows = [{'run': 'a' * 120, 'mIoU': 91.25, 'note': '<b>'}, {'run': 'b', 'mIoU': 90.0, 'note': ''}]
    sections = [
        Section('Gates', 'What opens.', pictures, command='python x --out DIR'),
        Section('Runs & tables', table=rows),
    ]
    return write_gallery(tmp_path / 'out', 'A report <of> gates', sections)


def test_everything_is_inside(page: Path) -> None:
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', text) and 'http' not in text and '<script' not in text
    assert '<b>' not in text and 'one &lt;small&gt; &amp; plain' in text and '<td>91.25</td>' in text
    for anchor in re.findall(r'href="#(\w+)"', text):
        assert f'id="{anchor}"' in text


@pytest.mark.parametrize(
    'sections, error',
    [
        ([Section('a'), Section('a')], 'titles of sections must differ'),
        ([Section('a', table=[dict(x=1), dict(y=1)])], 'must all have the keys x'),
    ],
    ids=['title', 'table'],
)
def test_refuses(sections: list[Section], error: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=error):
        write_gallery(tmp_path / 'out', 'title', sections)
    assert not (tmp_path / 'out').exists()


@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium: apt-get install chromium')
@pytest.mark.parametrize('size', ['400,800', '1400,900'], ids=['phone', 'desktop'])
def test_in_a_browser(page: Path, size: str, tmp_path: Path) -> None:
    probed = page.with_name('probed.html')
    probed.write_text(page.read_text().replace('</body>', f'{PROBE}</body>'))
    command = [str(CHROMIUM), '--headless', '--no-sandbox', '--disable-gpu', f'--window-size={size}']
    command += [f'--user-data-dir={tmp_path}/profile', '--enable-logging=stderr', '--virtual-time-budget=3000']
    shown = subprocess.run([*command, '--dump-dom', probed.as_uri()], capture_output=True, text=True, timeout=120)
    assert re.search(r'<title>\[2,true,0\]</title>', shown.stdout), shown.stdout[:300]
    assert 'CONSOLE' not in shown.stderr
