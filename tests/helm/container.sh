#!/bin/sh
# container.sh ROOT [ro|rw SOURCE TARGET]... -- COMMAND...: run COMMAND in the image unpacked at ROOT, which it sees
# read-only, with folders of this machine as its volumes. For `unshare --mount --pid --fork`.
set -eu
root=$1
shift
mount --bind "$root" "$root"
while [ "$1" != -- ]; do
    mkdir -p "$root$3"
    mount --bind "$2" "$root$3"
    mount --options "remount,bind,$1" "$root$3"
    shift 3
done
shift
mkdir -p "$root/proc" "$root/dev"
mount --types proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --options remount,bind,ro "$root"
ip link set lo up
exec chroot "$root" "$@"
