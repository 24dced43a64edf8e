#!/usr/bin/env bash
# Makes the test vectors again and fails if a byte under vectors/ differs from what git holds (index included).
set -euo pipefail
cd "$(dirname "$0")/.."

git rev-parse --is-inside-work-tree >/dev/null

.venv/bin/python scripts/make_vectors.py
changed=$(git diff --name-only -- vectors)
extra=$(git ls-files --others -- vectors)
if [ -n "$changed$extra" ]; then
  git --no-pager diff --stat -- vectors
  [ -z "$extra" ] || printf 'git does not hold: %s\n' $extra
  echo "vectors: what the code makes is not what git holds; if the change is meant, git add vectors" >&2
  exit 1
fi
printf 'vectors: %s files, every byte as committed\n' "$(git ls-files -- vectors | wc -l)"
