# Sourced by recipes, after EXTRA_ARGS holds the user's further flags.

# given FLAG...: whether the user gave one of them.
given() {
    local word flag
    for word in "${EXTRA_ARGS[@]}"; do
        for flag in "$@"; do
            [ "${word%%=*}" != "$flag" ] || return 0
        done
    done
    return 1
}
