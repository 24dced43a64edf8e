#!/usr/bin/env bash
# Installs the Debian packages that building and testing need, where they are missing: a C compiler for the kernels.
# Needs root and the network only if something is missing.
set -euo pipefail

command -v cc >/dev/null && exit 0
if ! command -v apt-get >/dev/null; then
  printf 'debian.sh: no C compiler (cc) and no apt-get; install a compiler, or name one in CC\n' >&2
  exit 1
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends gcc libc6-dev
