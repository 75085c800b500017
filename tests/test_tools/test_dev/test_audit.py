"""The audit of the packages that the extras pin."""

from __future__ import annotations

from conftest import tool


def test_an_audit_says_of_how_many_packages_it_knows() -> None:
    audit = tool('audit', 'dev')
    clean, unknown = dict(name='a', version='1', vulns=[]), dict(name='b', skip_reason='not found')
    faulty = dict(name='c', version='2', vulns=[dict(id='X-1', fix_versions=['3'])])
    assert audit.report([clean, unknown]) == (
        0,
        'audit: 1 packages asked about, 0 known vulnerabilities\naudit: no answer for 1: b',
    )
    status, page = audit.report([clean, faulty])
    assert status == 1 and page.splitlines()[0] == 'c 2: X-1, mended in 3' and 'asked about, 1 known' in page
    assert audit.report([unknown])[0] == 2, 'no answer at all is no clean bill'
