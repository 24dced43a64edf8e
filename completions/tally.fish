# Made by scripts/make_completions.py from the command line itself: edit nothing here.
complete -c tally -f -n '__fish_use_subcommand' -a 'audit bench bundle calibrate check chip conformance demo diff dispute draw export fleet inspect key log monitor neutral plan policy prove record registry report rules show sign simulate verify'
complete -c tally -n '__fish_use_subcommand' -l help
complete -c tally -n '__fish_use_subcommand' -l version
complete -c tally -n '__fish_seen_subcommand_from audit' -l announce
complete -c tally -n '__fish_seen_subcommand_from audit' -l announcement
complete -c tally -n '__fish_seen_subcommand_from audit' -l beacon
complete -c tally -n '__fish_seen_subcommand_from audit' -l claim
complete -c tally -n '__fish_seen_subcommand_from audit' -l detect
complete -c tally -n '__fish_seen_subcommand_from audit' -l device
complete -c tally -n '__fish_seen_subcommand_from audit' -l draw
complete -c tally -n '__fish_seen_subcommand_from audit' -l effort
complete -c tally -n '__fish_seen_subcommand_from audit' -l fraction
complete -c tally -n '__fish_seen_subcommand_from audit' -l help
complete -c tally -n '__fish_seen_subcommand_from audit' -l job
complete -c tally -n '__fish_seen_subcommand_from audit' -l json
complete -c tally -n '__fish_seen_subcommand_from audit' -l key
complete -c tally -n '__fish_seen_subcommand_from audit' -l log-policy
complete -c tally -n '__fish_seen_subcommand_from audit' -l log-proof
complete -c tally -n '__fish_seen_subcommand_from audit' -l max-moves
complete -c tally -n '__fish_seen_subcommand_from audit' -l max-silenced
complete -c tally -n '__fish_seen_subcommand_from audit' -l max-steer
complete -c tally -n '__fish_seen_subcommand_from audit' -l out
complete -c tally -n '__fish_seen_subcommand_from audit' -l profile
complete -c tally -n '__fish_seen_subcommand_from audit' -l round
complete -c tally -n '__fish_seen_subcommand_from audit' -l sample
complete -c tally -n '__fish_seen_subcommand_from audit' -l statement
complete -c tally -n '__fish_seen_subcommand_from audit' -l steps
complete -c tally -f -n '__fish_seen_subcommand_from bench; and not __fish_seen_subcommand_from chip evidence honest monitor training' -a 'chip evidence honest monitor training'
complete -c tally -n '__fish_seen_subcommand_from bench' -l help
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from chip' -l bytes
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from chip' -l help
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from chip' -l json
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from chip' -l steps
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from evidence' -l help
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from evidence' -l job
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from evidence' -l json
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from evidence' -l policy
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from evidence' -l runs
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from evidence' -l segment
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from evidence' -l set
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from honest' -l help
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from honest' -l job
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from honest' -l json
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from honest' -l policy
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from honest' -l profile
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from honest' -l set
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from honest' -l steps
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l chips
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l events
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l fleets
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l help
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l json
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l lot
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l made-only
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from monitor' -l seed
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l help
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l job
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l json
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l out
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l policy
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l quick
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l seeds
complete -c tally -n '__fish_seen_subcommand_from bench; and __fish_seen_subcommand_from training' -l steps
complete -c tally -n '__fish_seen_subcommand_from bundle' -l help
complete -c tally -n '__fish_seen_subcommand_from bundle' -l json
complete -c tally -n '__fish_seen_subcommand_from bundle' -l out
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l at
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l device
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l freedom
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l help
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l json
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l log-bits
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l optimizer-arithmetic
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l out
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l plot
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l policy
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l profile
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l recalibrate-every
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l repeats
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l seed
complete -c tally -n '__fish_seen_subcommand_from calibrate' -l set
complete -c tally -n '__fish_seen_subcommand_from check' -l against
complete -c tally -n '__fish_seen_subcommand_from check' -l help
complete -c tally -n '__fish_seen_subcommand_from check' -l json
complete -c tally -n '__fish_seen_subcommand_from check' -l policy
complete -c tally -n '__fish_seen_subcommand_from check' -l steps
complete -c tally -f -n '__fish_seen_subcommand_from chip; and not __fish_seen_subcommand_from agent attest collect device enrol init precommit show verify' -a 'agent attest collect device enrol init precommit show verify'
complete -c tally -n '__fish_seen_subcommand_from chip' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from agent' -l for
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from agent' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from agent' -l manifest
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from attest' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from attest' -l nonce
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from attest' -l out
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from attest' -l tpm
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from collect' -l chip
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from collect' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from collect' -l key
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from collect' -l listen
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l at
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l crl
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l device-root
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l measurements
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l nonce
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from device' -l require-crl
complete -c tally -f -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and not __fish_seen_subcommand_from answer challenge request sign' -a 'answer challenge request sign'
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from answer' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from answer' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from answer' -l out
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l at
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l crl
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l ek-root
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l keep
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l out
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from challenge' -l require-crl
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from request' -l certificates
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from request' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from request' -l issuers
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from request' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from request' -l out
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l at
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l crl
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l ek-root
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l kept
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l key
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l out
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from enrol; and __fish_seen_subcommand_from sign' -l require-crl
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l algorithm
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l capacity
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l collector
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l collector-key
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l device
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l device-root
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l hash-frozen
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l hold-ms
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l owner
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l page-bytes
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l retention-days
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l snapshots-per-day
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from init' -l tpm
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from precommit' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from show' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from show' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l at
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l attestation
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l crl
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l device
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l device-root
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l earlier
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l endorsement
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l enroller
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l help
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l json
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l key
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l measurements
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l nonce
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l pcrs
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l require-crl
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l tpm
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l tpm-enrolment
complete -c tally -n '__fish_seen_subcommand_from chip; and __fish_seen_subcommand_from verify' -l tpm-key
complete -c tally -f -n '__fish_seen_subcommand_from conformance; and not __fish_seen_subcommand_from run schema serve' -a 'run schema serve'
complete -c tally -n '__fish_seen_subcommand_from conformance' -l help
complete -c tally -n '__fish_seen_subcommand_from conformance; and __fish_seen_subcommand_from run' -l help
complete -c tally -n '__fish_seen_subcommand_from conformance; and __fish_seen_subcommand_from run' -l json
complete -c tally -n '__fish_seen_subcommand_from conformance; and __fish_seen_subcommand_from run' -l suite
complete -c tally -n '__fish_seen_subcommand_from conformance; and __fish_seen_subcommand_from run' -l timeout
complete -c tally -n '__fish_seen_subcommand_from conformance; and __fish_seen_subcommand_from run' -l vectors
complete -c tally -n '__fish_seen_subcommand_from conformance; and __fish_seen_subcommand_from schema' -l help
complete -c tally -n '__fish_seen_subcommand_from conformance; and __fish_seen_subcommand_from serve' -l help
complete -c tally -n '__fish_seen_subcommand_from demo' -l help
complete -c tally -n '__fish_seen_subcommand_from demo' -l keep
complete -c tally -n '__fish_seen_subcommand_from diff' -l after
complete -c tally -n '__fish_seen_subcommand_from diff' -l device
complete -c tally -n '__fish_seen_subcommand_from diff' -l effort
complete -c tally -n '__fish_seen_subcommand_from diff' -l help
complete -c tally -n '__fish_seen_subcommand_from diff' -l job
complete -c tally -n '__fish_seen_subcommand_from diff' -l json
complete -c tally -n '__fish_seen_subcommand_from diff' -l out
complete -c tally -f -n '__fish_seen_subcommand_from dispute; and not __fish_seen_subcommand_from answer open rule run' -a 'answer open rule run'
complete -c tally -n '__fish_seen_subcommand_from dispute' -l help
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from answer' -l dispute
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from answer' -l follow
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from answer' -l help
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from answer' -l job
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from answer' -l json
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from answer' -l key
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from answer' -l referee-signs
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l auditor-signs
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l deadline
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l help
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l json
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l key
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l level
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l out
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from open' -l trainer-signs
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from rule' -l accusation
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from rule' -l follow
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from rule' -l help
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from rule' -l job
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from rule' -l json
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from rule' -l key
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from rule' -l statement
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l accusation
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l auditor-key
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l auditor-signs
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l defence
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l help
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l job
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l json
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l key
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l level
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l out
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l record
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l statement
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l trainer-key
complete -c tally -n '__fish_seen_subcommand_from dispute; and __fish_seen_subcommand_from run' -l trainer-signs
complete -c tally -f -n '__fish_seen_subcommand_from draw; and not __fish_seen_subcommand_from announce sample' -a 'announce sample'
complete -c tally -n '__fish_seen_subcommand_from draw' -l help
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l beacon-round
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l beacon-source
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l beacon-time
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l frame
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l help
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l json
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l now
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l out
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l period
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l reports
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l reports-closed
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from announce' -l samples
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from sample' -l beacon
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from sample' -l digest
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from sample' -l frame
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from sample' -l help
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from sample' -l json
complete -c tally -n '__fish_seen_subcommand_from draw; and __fish_seen_subcommand_from sample' -l now
complete -c tally -n '__fish_seen_subcommand_from export' -l help
complete -c tally -n '__fish_seen_subcommand_from export' -l json
complete -c tally -n '__fish_seen_subcommand_from export' -l out
complete -c tally -f -n '__fish_seen_subcommand_from fleet; and not __fish_seen_subcommand_from judge' -a 'judge'
complete -c tally -n '__fish_seen_subcommand_from fleet' -l help
complete -c tally -n '__fish_seen_subcommand_from fleet; and __fish_seen_subcommand_from judge' -l claim
complete -c tally -n '__fish_seen_subcommand_from fleet; and __fish_seen_subcommand_from judge' -l findings
complete -c tally -n '__fish_seen_subcommand_from fleet; and __fish_seen_subcommand_from judge' -l help
complete -c tally -n '__fish_seen_subcommand_from fleet; and __fish_seen_subcommand_from judge' -l html
complete -c tally -n '__fish_seen_subcommand_from fleet; and __fish_seen_subcommand_from judge' -l json
complete -c tally -f -n '__fish_seen_subcommand_from inspect; and not __fish_seen_subcommand_from check hand-over order pack record seal' -a 'check hand-over order pack record seal'
complete -c tally -n '__fish_seen_subcommand_from inspect' -l help
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l deed-body
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l earlier
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l frame
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l help
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l json
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l logs
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l rounds
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from check' -l trust
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from hand-over' -l from
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from hand-over' -l help
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from hand-over' -l json
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from hand-over' -l now
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from hand-over' -l to
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l beacon
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l due
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l frame
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l help
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l inspector
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l json
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l key
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l now
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l out
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l photos
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l registry
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from order' -l seal
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from pack' -l help
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from pack' -l json
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from pack' -l key
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from pack' -l now
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from pack' -l trust
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l device-key
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l evidence
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l help
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l json
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l key
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l log
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l note
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l now
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l outcome
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l photo
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l seal
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from record' -l serial
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from seal' -l help
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from seal' -l json
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from seal' -l key
complete -c tally -n '__fish_seen_subcommand_from inspect; and __fish_seen_subcommand_from seal' -l now
complete -c tally -f -n '__fish_seen_subcommand_from key; and not __fish_seen_subcommand_from generate show' -a 'generate show'
complete -c tally -n '__fish_seen_subcommand_from key' -l help
complete -c tally -n '__fish_seen_subcommand_from key; and __fish_seen_subcommand_from generate' -l algorithm
complete -c tally -n '__fish_seen_subcommand_from key; and __fish_seen_subcommand_from generate' -l help
complete -c tally -n '__fish_seen_subcommand_from key; and __fish_seen_subcommand_from generate' -l json
complete -c tally -n '__fish_seen_subcommand_from key; and __fish_seen_subcommand_from show' -l help
complete -c tally -n '__fish_seen_subcommand_from key; and __fish_seen_subcommand_from show' -l json
complete -c tally -f -n '__fish_seen_subcommand_from log; and not __fish_seen_subcommand_from add checkpoint cosign init prove verify vkey' -a 'add checkpoint cosign init prove verify vkey'
complete -c tally -n '__fish_seen_subcommand_from log' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from add' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from add' -l json
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from checkpoint' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from checkpoint' -l json
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from checkpoint' -l key
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from cosign' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from cosign' -l json
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from cosign' -l key
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from cosign' -l log-key
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from cosign' -l memory
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from cosign' -l name
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from cosign' -l out
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from init' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from init' -l json
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from init' -l key
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from init' -l origin
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from prove' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from prove' -l json
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from prove' -l out
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from verify' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from verify' -l json
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from verify' -l log-key
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from verify' -l policy
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from vkey' -l help
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from vkey' -l json
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from vkey' -l key
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from vkey' -l name
complete -c tally -n '__fish_seen_subcommand_from log; and __fish_seen_subcommand_from vkey' -l witness
complete -c tally -f -n '__fish_seen_subcommand_from monitor; and not __fish_seen_subcommand_from demo memory report trace verify' -a 'demo memory report trace verify'
complete -c tally -n '__fish_seen_subcommand_from monitor' -l help
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from demo' -l help
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from demo' -l json
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from demo' -l keep
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from memory' -l beacon
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from memory' -l help
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from memory' -l job
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from memory' -l json
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from memory' -l records
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from memory' -l svg
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from report' -l chip
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from report' -l help
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from report' -l job
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from report' -l json
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from trace' -l chip
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from trace' -l help
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from trace' -l job
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from trace' -l json
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from trace' -l snapshot
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l announcement
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l attestation
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l beacon
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l chip
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l findings
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l help
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l html
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l inspection
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l job
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l json
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l largest
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l memory
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l nonce
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l reports
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l segments
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l since
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l snapshots-per-day
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l trust
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l until
complete -c tally -n '__fish_seen_subcommand_from monitor; and __fish_seen_subcommand_from verify' -l use
complete -c tally -f -n '__fish_seen_subcommand_from neutral; and not __fish_seen_subcommand_from check order pack run show sign verify' -a 'check order pack run show sign verify'
complete -c tally -n '__fish_seen_subcommand_from neutral' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from check' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from check' -l json
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l budget
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l constant-time
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l input
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l json
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l key
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l memory-mb
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l out
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l output
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l owner
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l program
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l repeats
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l report
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l scratch-mb
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l seconds
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from order' -l verifier
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from pack' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from pack' -l input
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from pack' -l json
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from pack' -l opening
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from pack' -l out
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from pack' -l program
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from run' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from run' -l json
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from run' -l key
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from run' -l now
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from run' -l out
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from run' -l owner
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from run' -l verifier
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from show' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from show' -l json
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from sign' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from sign' -l json
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from sign' -l key
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from sign' -l out
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from sign' -l program
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from verify' -l help
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from verify' -l json
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from verify' -l neutral
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from verify' -l order
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from verify' -l owner
complete -c tally -n '__fish_seen_subcommand_from neutral; and __fish_seen_subcommand_from verify' -l verifier
complete -c tally -n '__fish_seen_subcommand_from plan' -l chips
complete -c tally -n '__fish_seen_subcommand_from plan' -l fleet
complete -c tally -n '__fish_seen_subcommand_from plan' -l flop-per-chip-day
complete -c tally -n '__fish_seen_subcommand_from plan' -l help
complete -c tally -n '__fish_seen_subcommand_from plan' -l json
complete -c tally -n '__fish_seen_subcommand_from plan' -l period-days
complete -c tally -n '__fish_seen_subcommand_from plan' -l plot
complete -c tally -n '__fish_seen_subcommand_from plan' -l probability
complete -c tally -n '__fish_seen_subcommand_from plan' -l run-days
complete -c tally -n '__fish_seen_subcommand_from plan' -l snapshots-per-day
complete -c tally -n '__fish_seen_subcommand_from plan' -l threshold-flop
complete -c tally -f -n '__fish_seen_subcommand_from policy; and not __fish_seen_subcommand_from init' -a 'init'
complete -c tally -n '__fish_seen_subcommand_from policy' -l help
complete -c tally -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from init' -l auditor
complete -c tally -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from init' -l bundle
complete -c tally -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from init' -l help
complete -c tally -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from init' -l judge
complete -c tally -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from init' -l out
complete -c tally -n '__fish_seen_subcommand_from policy; and __fish_seen_subcommand_from init' -l trainer
complete -c tally -n '__fish_seen_subcommand_from prove' -l checkpoint
complete -c tally -n '__fish_seen_subcommand_from prove' -l chunk
complete -c tally -n '__fish_seen_subcommand_from prove' -l entry
complete -c tally -n '__fish_seen_subcommand_from prove' -l help
complete -c tally -n '__fish_seen_subcommand_from prove' -l out
complete -c tally -n '__fish_seen_subcommand_from prove' -l step
complete -c tally -n '__fish_seen_subcommand_from record' -l b-r
complete -c tally -n '__fish_seen_subcommand_from record' -l bands
complete -c tally -n '__fish_seen_subcommand_from record' -l checkpoint-every
complete -c tally -n '__fish_seen_subcommand_from record' -l chip
complete -c tally -n '__fish_seen_subcommand_from record' -l device
complete -c tally -n '__fish_seen_subcommand_from record' -l help
complete -c tally -n '__fish_seen_subcommand_from record' -l json
complete -c tally -n '__fish_seen_subcommand_from record' -l optimizer-arithmetic
complete -c tally -n '__fish_seen_subcommand_from record' -l policy
complete -c tally -n '__fish_seen_subcommand_from record' -l profile
complete -c tally -n '__fish_seen_subcommand_from record' -l recalibrate-every
complete -c tally -n '__fish_seen_subcommand_from record' -l resume
complete -c tally -n '__fish_seen_subcommand_from record' -l run
complete -c tally -n '__fish_seen_subcommand_from record' -l seed
complete -c tally -n '__fish_seen_subcommand_from record' -l set
complete -c tally -n '__fish_seen_subcommand_from record' -l steps
complete -c tally -n '__fish_seen_subcommand_from record' -l tau
complete -c tally -f -n '__fish_seen_subcommand_from registry; and not __fish_seen_subcommand_from append deed export frame open prove rebuild reconcile show sign stream verify' -a 'append deed export frame open prove rebuild reconcile show sign stream verify'
complete -c tally -n '__fish_seen_subcommand_from registry' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from append' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from append' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from append' -l key
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from append' -l now
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from deed' -l body
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from deed' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from deed' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from deed' -l now
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from deed' -l out
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from deed' -l registry
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from deed' -l sign
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from export' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from export' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from export' -l out
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from export' -l owner
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from frame' -l fleet
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from frame' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from frame' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from frame' -l now
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from frame' -l out
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from open' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from open' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from open' -l key
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from open' -l name
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from open' -l now
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from prove' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from prove' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from prove' -l out
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from prove' -l since
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from rebuild' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from rebuild' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from reconcile' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from reconcile' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from show' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from show' -l history
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from show' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from sign' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from sign' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from sign' -l out
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from sign' -l sign
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l chips
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l complete
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l from
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l now
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l out
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l party
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l source
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from stream' -l units
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from verify' -l help
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from verify' -l json
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from verify' -l key
complete -c tally -n '__fish_seen_subcommand_from registry; and __fish_seen_subcommand_from verify' -l owner
complete -c tally -n '__fish_seen_subcommand_from report' -l audit
complete -c tally -n '__fish_seen_subcommand_from report' -l bands
complete -c tally -n '__fish_seen_subcommand_from report' -l dispute
complete -c tally -n '__fish_seen_subcommand_from report' -l help
complete -c tally -n '__fish_seen_subcommand_from report' -l json
complete -c tally -n '__fish_seen_subcommand_from report' -l out
complete -c tally -f -n '__fish_seen_subcommand_from rules; and not __fish_seen_subcommand_from judge licence open records show' -a 'judge licence open records show'
complete -c tally -n '__fish_seen_subcommand_from rules' -l help
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l claim
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l help
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l inspection
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l json
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l known
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l licence
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l logs
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l owner
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l registry
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l result
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l stream
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from judge' -l trust
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from licence' -l help
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from licence' -l json
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from licence' -l key
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from licence' -l most-flop
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from licence' -l out
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from open' -l help
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from open' -l job
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from open' -l json
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from open' -l out
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from open' -l step
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from records' -l help
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from records' -l json
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from records' -l report
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from show' -l help
complete -c tally -n '__fish_seen_subcommand_from rules; and __fish_seen_subcommand_from show' -l json
complete -c tally -n '__fish_seen_subcommand_from show' -l help
complete -c tally -n '__fish_seen_subcommand_from show' -l json
complete -c tally -n '__fish_seen_subcommand_from sign' -l help
complete -c tally -n '__fish_seen_subcommand_from sign' -l json
complete -c tally -n '__fish_seen_subcommand_from sign' -l key
complete -c tally -n '__fish_seen_subcommand_from sign' -l out
complete -c tally -n '__fish_seen_subcommand_from simulate' -l chips
complete -c tally -n '__fish_seen_subcommand_from simulate' -l drawn
complete -c tally -n '__fish_seen_subcommand_from simulate' -l help
complete -c tally -n '__fish_seen_subcommand_from simulate' -l html
complete -c tally -n '__fish_seen_subcommand_from simulate' -l json
complete -c tally -n '__fish_seen_subcommand_from simulate' -l seed
complete -c tally -n '__fish_seen_subcommand_from simulate' -l trials
complete -c tally -n '__fish_seen_subcommand_from simulate' -l years
complete -c tally -n '__fish_seen_subcommand_from verify' -l auditor-signs
complete -c tally -n '__fish_seen_subcommand_from verify' -l bundle
complete -c tally -n '__fish_seen_subcommand_from verify' -l card
complete -c tally -n '__fish_seen_subcommand_from verify' -l chunk
complete -c tally -n '__fish_seen_subcommand_from verify' -l help
complete -c tally -n '__fish_seen_subcommand_from verify' -l json
complete -c tally -n '__fish_seen_subcommand_from verify' -l model
complete -c tally -n '__fish_seen_subcommand_from verify' -l policy
complete -c tally -n '__fish_seen_subcommand_from verify' -l root
complete -c tally -n '__fish_seen_subcommand_from verify' -l trainer-signs
