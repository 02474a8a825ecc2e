#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Java, and Maven, with which RocketMQ itself opens our stores (tests/rocketmq.py):
#   tools/java.sh          look for a JDK and Maven; when one is missing, install both if root on a machine with apt-get
#                          and without JAVA_HOME
#   tools/java.sh check    look only
#   tools/java.sh spark    the same for what Spark needs: a Java without compiler, no Maven
# Prints the Java home and returns 0, or prints what is missing and returns 3; of `spark` that line is on stderr.
set -euo pipefail

OLDEST=17
ABSENT=3

look() { # for a program of the JDK: java, javac
    local program=$1 found version
    found=${JAVA_HOME:+$JAVA_HOME/bin/$program}
    found=$(command -v "${found:-$program}") || {
        echo "no $program${JAVA_HOME:+ in JAVA_HOME=$JAVA_HOME}"
        return $ABSENT
    }
    version=$("$found" -version 2>&1 | sed -nE 's/^(javac|[a-z]+ version) "?([0-9]+).*/\2/p' | head -n 1) || version=0
    if [ "${version:-0}" -lt $OLDEST ]; then
        echo "$found is of Java ${version:-?}, $OLDEST or newer is needed"
        return $ABSENT
    fi
    dirname "$(dirname "$(readlink -f "$found")")"
}

look_for_all() {
    look javac >/dev/null || look javac || return
    command -v mvn >/dev/null || {
        echo "no mvn"
        return $ABSENT
    }
    look javac
}

may_install() { # what JAVA_HOME names is the user's choice: nothing is installed beside it
    [ -z "${JAVA_HOME:-}" ] && [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null
}

install() { # a Java package of either name, and what else is given
    local kind=$1 java
    shift
    export DEBIAN_FRONTEND=noninteractive
    echo "java: installing Java${*:+ and Maven}" >&2
    apt-get update -qq >&2
    for java in "openjdk-$OLDEST-$kind-headless" "default-$kind-headless"; do
        if apt-get install -y -qq --no-install-recommends "$java" "$@" >&2; then return; fi
    done
    return 1
}

case "${1:-}" in
check)
    look_for_all
    ;;
"")
    if ! look_for_all >/dev/null && may_install; then
        install jdk maven || echo "java: apt-get failed" >&2
    fi
    look_for_all
    ;;
spark)
    if ! look java >/dev/null && may_install; then
        install jre || echo "java: apt-get failed" >&2
    fi
    if ! found=$(look java); then
        echo "java: $found; Spark needs Java $OLDEST or newer (Debian: apt-get install default-jre-headless; or JAVA_HOME=...)" >&2
        exit $ABSENT
    fi
    echo "$found"
    ;;
*)
    echo "java: say check, spark, or nothing" >&2
    exit 2
    ;;
esac
