#!/bin/sh
# Installs the headless browser that tests open pages in, where that is permitted; without it those tests are skipped.
for name in chromium chromium-browser google-chrome; do
  command -v "$name" >/dev/null && exit 0
done
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "no Chromium here, and none can be installed: tests that need one are skipped" >&2
  exit 0
fi
export DEBIAN_FRONTEND=noninteractive
{ apt-get update && apt-get install -y --no-install-recommends chromium; } >/dev/null ||
  echo "Chromium could not be installed: tests that need one are skipped" >&2
