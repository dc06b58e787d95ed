# Sourced by recipes after they have set EXTRA_ARGS, the user's other flags.

# given FLAG...: succeed if the user gave one of these flags.
given() {
    local word flag
    for word in "${EXTRA_ARGS[@]}"; do
        for flag in "$@"; do
            [ "${word%%=*}" != "$flag" ] || return 0
        done
    done
    return 1
}
