#!/bin/sh
# `make test-modes`: all tests in random order with SIGINT ignored, then as an ordinary user without a network and with
# a home that cannot be written. The second needs root, who may become that user.
if [ "$1" = all ]; then
    .venv/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist loadscope -m "not alone" &&
        .venv/bin/python -m pytest -q -p no:cacheprovider -m alone
    exit
fi
NICEST_SHUFFLE=${NICEST_SHUFFLE:-$$}
export NICEST_SHUFFLE
echo "in random order, NICEST_SHUFFLE=$NICEST_SHUFFLE, and with SIGINT ignored"
(trap "" INT && sh "$0" all) || failed=1
if [ "$(id -u)" = 0 ] && unshare --net true; then
    echo "as an ordinary user, without a network or a home to write to"
    user="setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/ HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis-$$"
    unshare --net sh -c "ip link set lo up && exec $user sh $0 all" || failed=1
else
    echo "skipped, as that needs root: as an ordinary user, without a network or a home to write to"
fi
exit ${failed:-0}
