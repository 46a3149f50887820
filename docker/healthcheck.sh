#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Exit code 0 when the server of this container answers /health with 200. HEALTH_URL names another address.
set -eu

exec /opt/vllm/bin/python -c '
import sys, urllib.request
try:
    # No proxy, whatever the environment says: this is the container itself.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(sys.argv[1], timeout=4) as answer:
        sys.exit(answer.status != 200)
except OSError as error:
    sys.exit(f"{sys.argv[1]}: {error}")
' "${HEALTH_URL:-http://127.0.0.1:8000/health}"
