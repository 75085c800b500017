"""Look up known vulnerabilities of the packages in this environment, and count the packages with an answer."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any


def main() -> int:
    """Print the vulnerable and the unknown; return 1 for a vulnerability, 2 without an answer for any package."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--service', default='pypi', choices=['pypi', 'osv', 'esms'], help="pip-audit's")
    args = parser.parse_args()
    command = [sys.executable, '-m', 'pip_audit', '--format', 'json', '--progress-spinner', 'off']
    audit = subprocess.run([*command, '--vulnerability-service', args.service], capture_output=True, text=True)
    if not audit.stdout.strip():
        print(f'audit: {args.service} gave no answer: {audit.stderr.strip().splitlines()[-1][:300]}')
        return 2
    status, page = report(json.loads(audit.stdout)['dependencies'])
    print(page)
    return status


def report(dependencies: list[dict[str, Any]]) -> tuple[int, str]:
    """Return the exit status and the page for pip-audit's result on each package."""
    asked = [package for package in dependencies if 'skip_reason' not in package]
    unknown = [package['name'] for package in dependencies if 'skip_reason' in package]
    lines = [
        f'{package["name"]} {package["version"]}: {fault["id"]}, mended in {", ".join(fault["fix_versions"]) or "none"}'
        for package in asked
        for fault in package['vulns']
    ]
    status = 2 if not asked else 1 if lines else 0
    lines.append(f'audit: {len(asked)} packages asked about, {len(lines)} known vulnerabilities')
    if unknown:
        lines.append(f'audit: no answer for {len(unknown)}: {", ".join(sorted(unknown))}')
    return status, '\n'.join(lines)


if __name__ == '__main__':
    sys.exit(main())
