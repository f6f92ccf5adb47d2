#!/bin/bash
# A real S3-compatible object store on loopback: a one-node Ceph RADOS gateway that keeps its data in memory (about 350 MB, 13 s).
#   start_ceph.sh FOLDER PORT ACCESS_KEY SECRET_KEY     starts it; it uses PORT and the two after it
#   start_ceph.sh stop FOLDER                           stops what it started there
#   start_ceph.sh guard FOLDER                          the same, once its standard input ends
# Lookahead the Debian packages radosgw, ceph-mon, ceph-osd and ceph-common.
set -euo pipefail
if [ "$1" = guard ]; then
  cat >/dev/null
  exec bash "$0" stop "$2"
fi
if [ "$1" = stop ]; then
  pids=$(cat "$2"/out/*.pid 2>/dev/null || true)
  for pid in $pids; do kill -KILL "$pid" 2>/dev/null || true; done # nothing is to be kept
  rm -rf "$2"
  exit 0
fi
D=$(mkdir -p "$1" && cd "$1" && pwd) PORT=$2 ACCESS=$3 SECRET=$4
MON2=$((PORT + 1)) MON1=$((PORT + 2))
rm -rf "$D"/* && mkdir -p "$D/mon" "$D/osd" "$D/out" "$D/rgw"
export CEPH_CONF=$D/ceph.conf
uuid() { python3 -c 'import uuid; print(uuid.uuid4())'; }
FSID=$(uuid)
cat >"$CEPH_CONF" <<C
[global]
fsid = $FSID
mon host = [v2:127.0.0.1:$MON2,v1:127.0.0.1:$MON1]
public network = 127.0.0.0/8
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 1
osd pool default pgp num = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 1000
mon data avail warn = 1
mon data avail crit = 0
mon data = $D/mon
osd data = $D/osd
osd objectstore = memstore
memstore device bytes = 4294967296
memstore page set = true
osd class load list = *
osd class default list = *
rgw data = $D/rgw
rgw dns name = localhost
rgw multipart min part size = 65536
run dir = $D/out
crash dir = $D/out
log file = $D/out/\$name.log
pid file = $D/out/\$name.pid
admin socket = $D/out/\$name.asok
keyring = $D/keyring
C
K=$D/keyring
ceph-authtool --create-keyring "$K" --gen-key -n mon. --cap mon 'allow *' >/dev/null
ceph-authtool "$K" --gen-key -n client.admin --cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *' --cap mds 'allow *' >/dev/null
ceph-authtool "$K" --gen-key -n osd.0 --cap mon 'allow profile osd' --cap osd 'allow *' >/dev/null
ceph-authtool "$K" --gen-key -n client.rgw.a --cap mon 'allow rw' --cap osd 'allow rwx' >/dev/null
monmaptool --create --fsid "$FSID" --addv a "[v2:127.0.0.1:$MON2,v1:127.0.0.1:$MON1]" "$D/monmap" >/dev/null
ceph-mon --mkfs -i a --monmap "$D/monmap" --keyring "$K"
ceph-mon -i a >/dev/null 2>&1
OSD=$(uuid)                                    # the same uuid twice, or the osd never comes up
timeout 20 ceph osd new "$OSD" >/dev/null
ceph-osd -i 0 --mkfs --osd-uuid "$OSD" >/dev/null 2>&1
ceph-osd -i 0 >/dev/null 2>&1
timeout 20 ceph osd crush add osd.0 1.0 root=default host=h >/dev/null 2>&1 || true
# without tcp_nodelay every GET waits about 44 ms
radosgw -n client.rgw.a --rgw-frontends="beast endpoint=127.0.0.1:$PORT tcp_nodelay=1" --rgw-data="$D/rgw" --keyring="$K" >/dev/null 2>&1
timeout 100 radosgw-admin user create --uid=test --display-name=test --access-key="$ACCESS" --secret-key="$SECRET" >/dev/null 2>&1
