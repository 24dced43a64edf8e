#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, where they are missing: a C compiler for the kernels,
# bubblewrap for neutral runs. Needs root and the network only if something is missing.
set -euo pipefail

missing=()
command -v cc >/dev/null || missing+=(gcc libc6-dev)
command -v bwrap >/dev/null || missing+=(bubblewrap)
[ ${#missing[@]} -eq 0 ] && exit 0
if ! command -v apt-get >/dev/null; then
  printf 'debian.sh: no apt-get to install %s with\n' "${missing[*]}" >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
