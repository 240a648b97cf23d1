#!/usr/bin/env bash
# Installs NVIDIA Nsight Systems' command line from Debian's non-free packages. No GPU and no driver needed.
#
#   install-nsys.sh                    both versions, each into its default folder
#   install-nsys.sh 2023.4 [DIR]       default /opt/nsys23
#   install-nsys.sh 2022.4 [DIR]       default /opt/nsys
#
# Afterwards DIR/bin/nsys records (nvtx, osrt; cuda where there is a driver), exports, and gives statistics.
# With 2022.4 always pass --sample=none --cpuctxsw=none: its context-switch tracing can hang on new kernels.
# Running it twice is harmless. Needs root on Debian 12 amd64; uses the archive that this machine's apt uses.
set -euo pipefail

export DEBIAN_FRONTEND=noninteractive
libraries=(libelf1 libpfm4 libssh-4 libstdc++6)

usage() { sed -n '2,/^set /{/^#/s/^# \{0,1\}//p;}' "$0"; }
say() { echo "install-nsys: $*" >&2; }
die() {
    say "$*"
    exit 1
}

work=
new=
cleanup() { rm -rf ${work:+"$work"} ${new:+"$new"}; }
trap cleanup EXIT

# Another apt may hold a lock that DPkg::Lock::Timeout does not cover (lists, archives).
retry() {
    local try
    for try in 1 2 3 4 5 6; do
        if "$@"; then return 0; fi
        say "attempt $try failed: $*"
        sleep 10
    done
    die "gave up: $*"
}

works() { # DIR VERSION
    [ -x "$1/bin/nsys" ] && [[ $("$1/bin/nsys" --version 2>/dev/null) == *"version $2"* ]]
}

# The address of Debian's main archive and the key that signs it, as this machine's own apt has them.
find_archive() {
    local file
    archive_uri=
    archive_key=/usr/share/keyrings/debian-archive-keyring.gpg
    file=$(grep -lsE '^Suites:.*\bbookworm\b' /etc/apt/sources.list.d/*.sources | head -n 1 || true)
    if [ -n "$file" ]; then
        archive_uri=$(awk '/^Suites:.*bookworm/ { hit = 1 } /^URIs:/ { uri = $2 }
            /^$/ { if (hit) exit; uri = "" } END { print uri }' "$file")
        archive_key=$(awk -v key="$archive_key" '/^Signed-By:/ { key = $2; exit } END { print key }' "$file")
    else
        file=$(grep -lsE '^deb .*[[:space:]]bookworm[[:space:]].*\bmain\b' \
            /etc/apt/sources.list /etc/apt/sources.list.d/*.list | head -n 1 || true)
        [ -z "$file" ] || archive_uri=$(awk '/^deb .*[[:space:]]bookworm[[:space:]]/ {
            for (i = 2; i <= NF; i++) if ($i ~ /:\//) { print $i; exit } }' "$file")
    fi
    [ -n "$archive_uri" ] || die "no bookworm source under /etc/apt, so there is no archive to take the packages from"
}

# Downloads and unpacks the two packages into $work/root. The apt state is private: the machine's own sources and
# package lists stay as they are, and nothing of another Debian release can leak into it.
unpack() { # VERSION SUITE
    local full private deb
    mkdir -p "$work/lists/partial" "$work/cache/archives/partial" "$work/debs" "$work/root"
    chmod 755 "$work" # apt downloads as its own user
    chown -R _apt "$work" 2>/dev/null || true
    printf '%s\n' 'Types: deb' "URIs: $archive_uri" "Suites: $2" 'Components: non-free' "Signed-By: $archive_key" \
        >"$work/private.sources"
    private=(-o "Dir::Etc::sourcelist=$work/private.sources" -o Dir::Etc::sourceparts=/dev/null
        -o "Dir::State::lists=$work/lists" -o "Dir::Cache=$work/cache")
    retry apt-get "${private[@]}" -qq update >/dev/null
    full=$(apt-cache "${private[@]}" show nsight-systems |
        awk -v want="$1" '/^Version: / && index($2, want) == 1 { found = found ? found : $2 } END { print found }')
    [ -n "$full" ] || die "no nsight-systems $1 among $2's packages"
    (cd "$work/debs" &&
        retry apt-get "${private[@]}" -qq download "nsight-systems=$full" "nsight-systems-target=$full" >/dev/null)
    for deb in "$work"/debs/*.deb; do dpkg-deb -x "$deb" "$work/root"; done
}

install_one() { # VERSION SUITE DIR
    local dir=$3 target host missing
    case $dir in /*) ;; *) dir=$PWD/$dir ;; esac
    if works "$dir" "$1"; then
        say "$("$dir/bin/nsys" --version) is already in $dir"
        return
    fi
    [ "$(id -u)" = 0 ] || die "needs root, because it installs a library package"
    [ "$(dpkg --print-architecture)" = amd64 ] || die "only the amd64 packages are known to work"
    find_archive
    work=$(mktemp -d)
    new=$dir.new.$$
    unpack "$1" "$2"
    target=$(find "$work/root" -type d -name target-linux-x64 | head -n 1)
    host=$(find "$work/root" -type d -name host-linux-x64 | head -n 1)
    [ -n "$target" ] && [ -n "$host" ] || die "the packages' layout has changed: no target-linux-x64 or host-linux-x64"
    # What the command line and its importer load. The packages name far more: the graphical program's libraries.
    dpkg -s "${libraries[@]}" >/dev/null 2>&1 || {
        retry apt-get -qq update >/dev/null
        retry apt-get -o DPkg::Lock::Timeout=300 -qq install -y --no-install-recommends "${libraries[@]}" >/dev/null
    }
    mkdir -p "$new/bin"
    # Debian keeps the two halves apart, but each looks for the other beside itself.
    cp -a "$target" "$host" "$new/"
    # Statistics run from the host half; their Python modules come with the target half.
    if [ -d "$target/python" ]; then cp -an "$target/python/." "$new/host-linux-x64/python/"; fi
    ln -sf /usr/lib/x86_64-linux-gnu/libssh.so.4 "$new/host-linux-x64/libssh.so.4"
    ln -sf libssh.so.4 "$new/host-linux-x64/libssh.so"
    printf '#!/bin/sh\nexec "%s/target-linux-x64/nsys" "$@"\n' "$dir" >"$new/bin/nsys"
    chmod 755 "$new/bin/nsys"
    missing=$(ldd "$new"/host-linux-x64/QdstrmImporter "$new"/target-linux-x64/nsys |
        awk '/not found/ { print $1 }' | sort -u | tr '\n' ' ')
    [ -z "$missing" ] || die "libraries are missing on this machine: $missing"
    rm -rf "$dir"
    mv "$new" "$dir"
    works "$dir" "$1" ||
        die "it is in $dir, but $dir/bin/nsys does not run: $("$dir/bin/nsys" --version 2>&1 | tail -n 1)"
    cleanup
    work=
    new=
    say "$("$dir/bin/nsys" --version) is now in $dir"
}

case ${1:-both} in
    both)
        install_one 2023.4 trixie /opt/nsys23
        install_one 2022.4 bookworm /opt/nsys
        ;;
    2023.4) install_one 2023.4 trixie "${2:-/opt/nsys23}" ;;
    2022.4) install_one 2022.4 bookworm "${2:-/opt/nsys}" ;;
    -h | --help) usage ;;
    *)
        usage >&2
        exit 2
        ;;
esac
