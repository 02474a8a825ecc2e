#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Java and Maven, with which RocketMQ itself opens our stores (tests/rocketmq.py):
#   tools/java.sh          look for them; when one is missing, install both if root on a machine with apt-get
#   tools/java.sh check    look only
# Prints the Java home and returns 0, or prints what is missing and returns 3.
set -euo pipefail

OLDEST=17
ABSENT=3

look() {
    local javac version
    javac=${JAVA_HOME:+$JAVA_HOME/bin/javac}
    javac=$(command -v "${javac:-javac}") || {
        echo "no javac"
        return $ABSENT
    }
    version=$("$javac" -version 2>&1 | sed -n 's/^javac \([0-9]*\).*/\1/p') || version=0
    if [ "${version:-0}" -lt $OLDEST ]; then
        echo "$javac is of Java ${version:-?}, $OLDEST or newer is needed"
        return $ABSENT
    fi
    command -v mvn >/dev/null || {
        echo "no mvn"
        return $ABSENT
    }
    dirname "$(dirname "$(readlink -f "$javac")")"
}

install() {
    local jdk
    export DEBIAN_FRONTEND=noninteractive
    echo "java: installing a JDK and Maven" >&2
    apt-get update -qq >&2
    for jdk in openjdk-$OLDEST-jdk-headless default-jdk-headless; do
        if apt-get install -y -qq --no-install-recommends "$jdk" maven >&2; then return; fi
    done
    return 1
}

case "${1:-}" in
check)
    look
    ;;
"")
    if ! look >/dev/null && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
        install || echo "java: apt-get failed" >&2
    fi
    look
    ;;
*)
    echo "java: say check, or nothing" >&2
    exit 2
    ;;
esac
