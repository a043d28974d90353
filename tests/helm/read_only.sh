#!/bin/sh
# read_only.sh ROOT COMMAND...: run COMMAND in the image unpacked at ROOT as Kubernetes would: user 65532, a root file
# system that is read-only, a temporary folder, no network but loopback. For `unshare --mount --net --pid --fork`.
set -eu
root=$1
shift
mount --bind "$root" "$root"
mount --options remount,bind,ro "$root"
mount --types tmpfs --options mode=1777 tmpfs "$root/tmp"
mount --types proc proc "$root/proc"
mount --rbind /dev "$root/dev"
ip link set lo up
exec chroot --userspec=65532:65532 --groups= "$root" "$@"
