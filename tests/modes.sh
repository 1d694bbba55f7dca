#!/bin/sh
# `make test-modes`: all tests in random order with SIGINT ignored, then as an ordinary user without a network and with
# a home that cannot be written. The second needs root, and a user who may read Python and this folder.
if [ "$1" = all ]; then
    .venv/bin/python -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --no-loadscope-reorder -m "not alone" &&
        .venv/bin/python -m pytest -q -p no:cacheprovider -m alone
    exit
fi
export NICEST_SHUFFLE="${NICEST_SHUFFLE:-$$}"
echo "in random order, NICEST_SHUFFLE=$NICEST_SHUFFLE, and with SIGINT ignored"
(trap "" INT && sh "$0" all) || failed=1
user="setpriv --reuid=65534 --regid=65534 --clear-groups env HOME=/ HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis-$$"
if unshare --net $user test -x "$(readlink -f .venv/bin/python)"; then
    echo "as an ordinary user, without a network or a home to write to"
    unshare --net sh -c "ip link set lo up && exec $user sh $0 all" || failed=1
else
    echo "skipped, as it needs root and a user who may read this: as an ordinary user, without a network or a home"
fi
exit "${failed:-0}"
