# Made by scripts/make_completions.py from the command line itself: edit nothing here.
_tally() {
    local current="${COMP_WORDS[COMP_CWORD]}" path="tally" words="" index
    for ((index = 1; index < COMP_CWORD; index++)); do
        [[ ${COMP_WORDS[index]} == -* ]] && break
        path="$path ${COMP_WORDS[index]}"
        case "$path" in
        "tally bench" | "tally chip" | "tally chip enrol" | "tally conformance" | "tally dispute" | "tally draw" | "tally fleet" | "tally inspect" | "tally key" | "tally log" | "tally monitor" | "tally neutral" | "tally policy" | "tally registry" | "tally rules") ;;
        *) break ;;
        esac
    done
    COMPREPLY=()
    if [[ $current == -* ]]; then
        case "$path" in
        "tally") words="--help --version" ;;
        "tally audit") words="--announce --announcement --beacon --claim --detect --device --draw --effort --fraction --help --job --json --key --log-policy --log-proof --max-moves --max-silenced --max-steer --out --profile --round --sample --statement --steps" ;;
        "tally bench") words="--help" ;;
        "tally bench chip") words="--bytes --help --json --steps" ;;
        "tally bench evidence") words="--help --job --json --policy --runs --segment --set" ;;
        "tally bench honest") words="--help --job --json --policy --profile --set --steps" ;;
        "tally bench monitor") words="--chips --events --fleets --help --json --lot --made-only --seed" ;;
        "tally bench training") words="--help --job --json --out --policy --quick --seeds --steps" ;;
        "tally bundle") words="--help --json --out" ;;
        "tally calibrate") words="--at --device --freedom --help --json --log-bits --optimizer-arithmetic --out --plot --policy --profile --recalibrate-every --repeats --seed --set" ;;
        "tally check") words="--against --help --json --policy --steps" ;;
        "tally chip") words="--help" ;;
        "tally chip agent") words="--for --help --manifest" ;;
        "tally chip attest") words="--help --nonce --out --tpm" ;;
        "tally chip collect") words="--chip --help --key --listen" ;;
        "tally chip device") words="--at --crl --device-root --help --json --measurements --nonce --require-crl" ;;
        "tally chip enrol") words="--help" ;;
        "tally chip enrol answer") words="--help --json --out" ;;
        "tally chip enrol challenge") words="--at --crl --ek-root --help --json --keep --out --require-crl" ;;
        "tally chip enrol request") words="--certificates --help --issuers --json --out" ;;
        "tally chip enrol sign") words="--at --crl --ek-root --help --json --kept --key --out --require-crl" ;;
        "tally chip init") words="--algorithm --capacity --collector --collector-key --device --device-root --hash-frozen --help --hold-ms --json --owner --page-bytes --retention-days --snapshots-per-day --tpm" ;;
        "tally chip precommit") words="--help" ;;
        "tally chip show") words="--help --json" ;;
        "tally chip verify") words="--at --attestation --crl --device --device-root --earlier --endorsement --enroller --help --json --key --measurements --nonce --pcrs --require-crl --tpm --tpm-enrolment --tpm-key" ;;
        "tally conformance") words="--help" ;;
        "tally conformance run") words="--help --json --suite --timeout --vectors" ;;
        "tally conformance schema") words="--help" ;;
        "tally conformance serve") words="--help" ;;
        "tally demo") words="--help --keep" ;;
        "tally diff") words="--after --device --effort --help --job --json --out" ;;
        "tally dispute") words="--help" ;;
        "tally dispute answer") words="--dispute --follow --help --job --json --key --referee-signs" ;;
        "tally dispute open") words="--auditor-signs --deadline --help --json --key --level --out --trainer-signs" ;;
        "tally dispute rule") words="--accusation --follow --help --job --json --key --statement" ;;
        "tally dispute run") words="--accusation --auditor-key --auditor-signs --defence --help --job --json --key --level --out --record --statement --trainer-key --trainer-signs" ;;
        "tally draw") words="--help" ;;
        "tally draw announce") words="--beacon-round --beacon-source --beacon-time --frame --help --json --now --out --period --reports --reports-closed --samples" ;;
        "tally draw sample") words="--beacon --digest --frame --help --json --now" ;;
        "tally export") words="--help --json --out" ;;
        "tally fleet") words="--help" ;;
        "tally fleet judge") words="--claim --findings --help --html --json" ;;
        "tally inspect") words="--help" ;;
        "tally inspect check") words="--deed-body --earlier --frame --help --json --logs --rounds --trust" ;;
        "tally inspect hand-over") words="--from --help --json --now --to" ;;
        "tally inspect order") words="--beacon --due --frame --help --inspector --json --key --now --out --photos --registry --seal" ;;
        "tally inspect pack") words="--help --json --key --now --trust" ;;
        "tally inspect record") words="--device-key --evidence --help --json --key --log --note --now --outcome --photo --seal --serial" ;;
        "tally inspect seal") words="--help --json --key --now" ;;
        "tally key") words="--help" ;;
        "tally key generate") words="--algorithm --help --json" ;;
        "tally key show") words="--help --json" ;;
        "tally log") words="--help" ;;
        "tally log add") words="--help --json" ;;
        "tally log checkpoint") words="--help --json --key" ;;
        "tally log cosign") words="--help --json --key --log-key --memory --name --out" ;;
        "tally log init") words="--help --json --key --origin" ;;
        "tally log prove") words="--help --json --out" ;;
        "tally log verify") words="--help --json --log-key --policy" ;;
        "tally log vkey") words="--help --json --key --name --witness" ;;
        "tally monitor") words="--help" ;;
        "tally monitor demo") words="--help --json --keep" ;;
        "tally monitor memory") words="--beacon --help --job --json --records --svg" ;;
        "tally monitor report") words="--chip --help --job --json" ;;
        "tally monitor trace") words="--chip --help --job --json --snapshot" ;;
        "tally monitor verify") words="--announcement --attestation --beacon --chip --findings --help --html --inspection --job --json --largest --memory --nonce --reports --segments --since --snapshots-per-day --trust --until --use" ;;
        "tally neutral") words="--help" ;;
        "tally neutral check") words="--help --json" ;;
        "tally neutral order") words="--budget --constant-time --help --input --json --key --memory-mb --out --output --owner --program --repeats --report --scratch-mb --seconds --verifier" ;;
        "tally neutral pack") words="--help --input --json --opening --out --program" ;;
        "tally neutral run") words="--help --json --key --now --out --owner --verifier" ;;
        "tally neutral show") words="--help --json" ;;
        "tally neutral sign") words="--help --json --key --out --program" ;;
        "tally neutral verify") words="--help --json --neutral --order --owner --verifier" ;;
        "tally plan") words="--chips --fleet --flop-per-chip-day --help --json --period-days --plot --probability --run-days --snapshots-per-day --threshold-flop" ;;
        "tally policy") words="--help" ;;
        "tally policy init") words="--auditor --bundle --help --judge --out --trainer" ;;
        "tally prove") words="--checkpoint --chunk --entry --help --out --step" ;;
        "tally record") words="--b-r --bands --checkpoint-every --chip --device --help --json --optimizer-arithmetic --policy --profile --recalibrate-every --resume --run --seed --set --steps --tau" ;;
        "tally registry") words="--help" ;;
        "tally registry append") words="--help --json --key --now" ;;
        "tally registry deed") words="--body --help --json --now --out --registry --sign" ;;
        "tally registry export") words="--help --json --out --owner" ;;
        "tally registry frame") words="--fleet --help --json --now --out" ;;
        "tally registry open") words="--help --json --key --name --now" ;;
        "tally registry prove") words="--help --json --out --since" ;;
        "tally registry rebuild") words="--help --json" ;;
        "tally registry reconcile") words="--help --json" ;;
        "tally registry show") words="--help --history --json" ;;
        "tally registry sign") words="--help --json --out --sign" ;;
        "tally registry stream") words="--chips --complete --from --help --json --now --out --party --source --units" ;;
        "tally registry verify") words="--help --json --key --owner" ;;
        "tally report") words="--audit --bands --dispute --help --json --out" ;;
        "tally rules") words="--help" ;;
        "tally rules judge") words="--claim --help --inspection --json --known --licence --logs --owner --registry --result --stream --trust" ;;
        "tally rules licence") words="--help --json --key --most-flop --out" ;;
        "tally rules open") words="--help --job --json --out --step" ;;
        "tally rules records") words="--help --json --report" ;;
        "tally rules show") words="--help --json" ;;
        "tally show") words="--help --json" ;;
        "tally sign") words="--help --json --key --out" ;;
        "tally simulate") words="--chips --drawn --help --html --json --seed --trials --years" ;;
        "tally verify") words="--auditor-signs --bundle --card --chunk --help --json --model --policy --root --trainer-signs" ;;
        esac
    else
        case "$path" in
        "tally") words="audit bench bundle calibrate check chip conformance demo diff dispute draw export fleet inspect key log monitor neutral plan policy prove record registry report rules show sign simulate verify" ;;
        "tally bench") words="chip evidence honest monitor training" ;;
        "tally chip") words="agent attest collect device enrol init precommit show verify" ;;
        "tally chip enrol") words="answer challenge request sign" ;;
        "tally conformance") words="run schema serve" ;;
        "tally dispute") words="answer open rule run" ;;
        "tally draw") words="announce sample" ;;
        "tally fleet") words="judge" ;;
        "tally inspect") words="check hand-over order pack record seal" ;;
        "tally key") words="generate show" ;;
        "tally log") words="add checkpoint cosign init prove verify vkey" ;;
        "tally monitor") words="demo memory report trace verify" ;;
        "tally neutral") words="check order pack run show sign verify" ;;
        "tally policy") words="init" ;;
        "tally registry") words="append deed export frame open prove rebuild reconcile show sign stream verify" ;;
        "tally rules") words="judge licence open records show" ;;
        esac
    fi
    local word
    if [[ -n $words ]]; then
        while read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$words" -- "$current")
    else
        while read -r word; do COMPREPLY+=("$word"); done < <(compgen -f -- "$current")
    fi
}
complete -o filenames -F _tally tally
