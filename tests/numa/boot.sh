#!/usr/bin/env bash
# boot.sh KERNEL PROBE: runs init.sh in an emulated machine with two nodes and prints what it says. The guest has a kernel,
# busybox, the probe and the libraries that the probe is linked with; it sees neither the host's files nor its network.
set -euo pipefail
kernel=$1
probe=$2
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root="$work/root"
mkdir -p "$root"/{bin,proc,sys,group}
cp "$(command -v busybox)" "$root/bin/busybox"
ln -s busybox "$root/bin/sh"
strip -o "$root/bin/numa_probe" "$probe"
cp "$here/init.sh" "$root/init"
chmod +x "$root/init"
ldd "$probe" | grep -o '/[^ ]*' | while read -r library; do
  mkdir -p "$root$(dirname "$library")"
  cp -L "$library" "$root$library"
done
(cd "$root" && find . -print0 | cpio --null --create --format=newc --quiet) >"$work/initramfs"

# Two nodes of one processor and 512 MiB each, twice as far from each other as from themselves.
timeout 120 qemu-system-x86_64 \
  -machine pc,accel=tcg -cpu max -m 1024 -smp 2 \
  -object memory-backend-ram,id=m0,size=512M -object memory-backend-ram,id=m1,size=512M \
  -numa node,nodeid=0,cpus=0,memdev=m0 -numa node,nodeid=1,cpus=1,memdev=m1 \
  -numa dist,src=0,dst=1,val=20 \
  -kernel "$kernel" -initrd "$work/initramfs" -append "console=ttyS0 quiet loglevel=0 panic=-1" \
  -nodefaults -no-reboot -display none -serial stdio </dev/null
