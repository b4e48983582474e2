#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Installs Debian's chromium and its driver for the tests marked `browser` (make browser). Needs root and a network;
# nothing else in this repository installs system packages.
set -eu
if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then
    echo "chromium and chromedriver are already here"
    exit 0
fi
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core
