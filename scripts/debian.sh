#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, where they are missing: a C compiler for the kernels,
# bubblewrap for neutral runs, and for the tests of TPM keys a software TPM (swtpm) with the library that speaks to it
# (tpm2-tss), and Node for the second reader. Without the latter those tests are skipped. Needs root and the network only if something is missing.
set -euo pipefail

missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v swtpm >/dev/null || missing+=(swtpm)
command -v node >/dev/null || missing+=(nodejs)
{ command -v pkg-config >/dev/null && pkg-config --exists tss2-esys; } || missing+=(pkg-config libtss2-dev)
[ ${#missing[@]} -gt 0 ] || exit 0
if ! command -v apt-get >/dev/null; then
  command -v cc >/dev/null && exit 0 # enough to build; tests that need the others are skipped
  printf 'debian.sh: no C compiler (cc) and no apt-get; install a compiler, or name one in CC\n' >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
