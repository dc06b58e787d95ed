#!/usr/bin/env bash
# Print an interpreter of Python 3.12 or later: one on PATH or of pyenv, else Python 3.13 built into a folder.
#
#   bash tests/newer_python.sh FOLDER      exit code 1 if there is none
#
# It builds Debian's source package: 23 MB to download, 3 minutes on two cores, once. Needs apt-get, make, gcc and the
# headers of zlib, OpenSSL, libffi, bzip2, lzma and SQLite.
set -eu
FOLDER=$(realpath -m "$1")
pyenv=${PYENV_ROOT:-$HOME/.pyenv}/versions
for candidate in python3.1{3,2,4} python3 "$pyenv"/3.1{3,2,4}*/bin/python "$FOLDER/bin/python3"; do
    "$candidate" -c 'import ctypes, ensurepip, lzma, sqlite3, ssl, sys, venv; sys.exit(not (3, 12) <= sys.version_info[:2] <= (3, 14))' \
        2>/dev/null && exec "$candidate" -c 'import sys; print(sys.executable)'
done
command -v apt-get >/dev/null && command -v make >/dev/null || exit 1
archive=$(grep -rhoE 'https?://[^ ]+/debian/?( |$)' /etc/apt/sources.list* | head -n 1)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$(dirname "$FOLDER")"
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $archive trixie main" > "$work/sources.list"
options=(-q -o Dir::Etc::sourcelist="$work/sources.list" -o Dir::Etc::sourceparts=- -o Dir::State::lists="$work/lists"
    -o Dir::Cache="$work/cache" -o APT::Sandbox::User=root)
(
    cd "$work"
    apt-get "${options[@]}" update
    apt-get "${options[@]}" source --download-only python3.13
    tar xf python3.13_*.orig.tar.xz
    cd Python-3.13*/
    ./configure -q --prefix="$FOLDER" --with-ensurepip=install --disable-test-modules
    make -s -j 2
    make -s install DESTDIR="$work/new"
    rm -rf "$FOLDER"
    mv "$work/new$FOLDER" "$FOLDER"
) > "$FOLDER.log" 2>&1
exec "$FOLDER/bin/python3" -c 'import sys; print(sys.executable)'
