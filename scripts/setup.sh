#!/usr/bin/env bash
# Makes .venv with Tallystick (editable), all extras, the developer tools and those of the site, at the versions in constraints.txt.
# Quick when nothing changed since the last time.
#
#   PYTHON=python3.12          which interpreter makes a new .venv (default python3; 3.11 or newer)
#   TORCH_SPEC=torch==2.12.1   another torch: a requirement, a path or the address of a wheel (default: the pinned one)
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3}
venv_python=.venv/bin/python
stamp=.venv/tallystick-setup

say() { printf 'setup: %s\n' "$*"; }
fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }

# tpm2-pytss is built against the machine's tpm2-tss: only where its headers are.
extras=all
if command -v pkg-config >/dev/null && pkg-config --exists tss2-esys; then extras=all,tpm; fi

# The state that the environment was made from: these files, where it stands, which torch was asked for, which extras.
fingerprint() {
  "$venv_python" - "$1" "$extras" <<'PY'
import hashlib, pathlib, sys
state = hashlib.sha256()
for part in (*(pathlib.Path(name).read_bytes() for name in ("pyproject.toml", "constraints.txt", "scripts/setup.sh",
                                                             "hatch_build.py", "scripts/compile_kernels.py",
                                                             "src/tallystick/roles/elsewhen.c",
                                                             *sorted(map(str, pathlib.Path("src/tallystick/numerics").glob("*.[ch]"))))),
             str(pathlib.Path.cwd()).encode(), sys.argv[1].encode(), sys.argv[2].encode()):
    state.update(len(part).to_bytes(8, "little") + part)
print(state.hexdigest(), sys.argv[1])
PY
}

is_new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

pinned_torch=$(grep -E '^torch==' constraints.txt)
# Without TORCH_SPEC the torch chosen at the last set-up stays, so that plain `make` keeps a torch brought by the user.
torch_spec=${TORCH_SPEC:-}
if [ -z "$torch_spec" ] && [ -f "$stamp" ]; then
  torch_spec=$(cut -d' ' -f2- "$stamp")
  # ... unless it was only the default of then.
  [[ $torch_spec == pinned:* ]] && torch_spec=
fi
asked=${torch_spec:-pinned:$pinned_torch}
torch_spec=${torch_spec:-$pinned_torch}

if [ -x "$venv_python" ] && is_new_enough "$venv_python"; then
  if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$(fingerprint "$asked")" ]; then
    say "up to date"
    exit 0
  fi
else
  command -v "$python" >/dev/null || fail "$python is not there; name an interpreter, 3.11 or newer: PYTHON=/path/to/python3 make ..."
  is_new_enough "$python" || fail "$python is $("$python" -V 2>&1); Tallystick needs Python 3.11 or newer: PYTHON=/path/to/python3 make ..."
  say "making .venv with $("$python" -V)"
  "$python" -m venv --clear .venv
fi

if [ -z "${CC:-}" ] && ! command -v cc >/dev/null && ! command -v gcc >/dev/null && ! command -v clang >/dev/null; then
  fail "no C compiler for the kernels: install one (Debian: scripts/debian.sh), or name one in CC"
fi
rm -f "$stamp"
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
pip() { "$venv_python" -m pip --disable-pip-version-check --no-input -qq "$@"; }

say "pip with dependency groups (25.1 or newer)"
pip install --upgrade 'pip>=25.1'

say "torch first and alone: $torch_spec"
grep -vE '^(torch|triton)==' constraints.txt >"$constraints" # a torch built for CUDA names its own triton
pip install -c "$constraints" "$torch_spec"

# From here on the installed torch, pinned or brought, is what nothing may change; likewise the triton that came with it.
"$venv_python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch").split("+")[0])' >>"$constraints"
"$venv_python" -c 'import importlib.metadata as m; print("triton==" + m.version("triton"))' >>"$constraints" 2>/dev/null ||
  grep -E '^triton==' constraints.txt >>"$constraints"

say "tallystick, its extras ($extras) and the developer tools"
pip install -c "$constraints" --editable ".[$extras]" --group dev --group docs

fingerprint "$asked" >"$stamp.new"
mv "$stamp.new" "$stamp"
say "done"
