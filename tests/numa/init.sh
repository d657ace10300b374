#!/bin/sh
# The first and only program of the guest: runs the probe in several situations and switches the machine off.
# Each result is a line "RESULT name {...}".
/bin/busybox --install -s /bin
mount -t proc none /proc
mount -t sysfs none /sys
mount -t cgroup2 none /group

probe() {
  name=$1
  shift
  echo "RESULT $name $("$@" 2>&1)"
}

# A group that may use the memory of the second node only, and the processors of both.
echo +cpuset >/group/cgroup.subtree_control
mkdir /group/second
echo 1 >/group/second/cpuset.mems

probe spread numa_probe spread
probe sysfs env HWLOC_COMPONENTS=stop numa_probe spread
probe off numa_probe off
probe one_node_of_memory sh -c 'echo $$ >/group/second/cgroup.procs && exec numa_probe spread'
probe one_processor taskset 2 numa_probe spread
probe slots numa_probe slots
probe crowded numa_probe crowded
poweroff -f
