#!/bin/sh
# The init of a user-mode Linux: one workload on a file system whose writes dm-log-writes logs. blocklog.py starts it.
#
# Its root is the host's, read-only. From the kernel's command line it has, as variables: `scratch`, a directory of the
# host with this script, the program and the shim; `fs`, `seed`, `operations`; `lie` and `liar` for the shim; `modules`. ubda has
# the file system and ubdb becomes the log. What was begun and acknowledged goes into the log as marks, at once. In
# `scratch`, `ended` gets the exit code of the workload and `output` what it said.
set -eu
export PATH=/usr/sbin:/usr/bin:/sbin:/bin DM_DISABLE_UDEV=1

mount -t proc proc /proc
mount -t tmpfs tmpfs /mnt
mkdir /mnt/scratch /mnt/disk
mount -t hostfs -o "$scratch" hostfs /mnt/scratch
: >/mnt/scratch/started

for module in dm-mod dm-log-writes; do insmod "$modules/$module.ko"; done
dmsetup create logged --table "0 $(blockdev --getsz /dev/ubda) log-writes /dev/ubda /dev/ubdb"
mount -t "$fs" /dev/mapper/logged /mnt/disk

# The workload goes on when its line is a mark.
mkfifo /mnt/lines /mnt/answers
while read -r line; do
  dmsetup message logged 0 mark "$line"
  echo
done </mnt/lines >/mnt/answers &

code=0
if [ -n "$lie" ]; then
  export TIERLOAD_SHIM_DIR="/mnt/disk/$liar" TIERLOAD_SHIM_LIE="$lie" LD_PRELOAD=/mnt/scratch/shim.so
fi
/mnt/scratch/tierload_workload run /mnt/disk/store "$seed" "$operations" /mnt/lines --direct --ask \
  <>/mnt/answers >/mnt/scratch/output 2>&1 || code=$?
unset LD_PRELOAD
dmsetup message logged 0 mark end
until umount /mnt/disk 2>/dev/null; do sleep 0.1; done # a ring holds its files a little longer than its process
dmsetup remove logged # this ends the log
echo "$code" >/mnt/scratch/ended
echo o >/proc/sysrq-trigger # power off
sleep 10
