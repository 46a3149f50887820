#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The user that the image runs as: user.sh UID. Its home belongs to group 0, so that any other uid with group 0 works too
# (docker run --user, OpenShift). A base that has this uid already keeps its own name for it.
set -eu

uid=${1:?user.sh UID}
home=/home/vllm
mkdir -p "$home"
if ! getent passwd "$uid" >/dev/null; then
    useradd --uid "$uid" --gid 0 --home-dir "$home" --no-create-home --shell /bin/sh vllm
fi
chown "$uid:0" "$home"
chmod 0770 "$home"
