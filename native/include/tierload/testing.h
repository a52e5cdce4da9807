// Known mistakes that the crash tests seed to show that they would be found. Production code passes `none`.
#pragma once

namespace tierload {

enum class Mutant {
  none,
  no_segment_sync,            // segments are not synced before COMMIT
  no_manifest_sync,           // manifests are not synced before COMMIT
  no_directory_sync,          // new names are not synced before COMMIT
  one_commit_copy,            // the mirror journal is not written
  ack_before_sync,            // a group is acknowledged without a sync
  early_reuse,                // dead pages are freed before COLLECT is durable
  no_relog,                   // a reader shows what it found without syncing it
  shared_sector,              // a group starts right behind the previous one
  no_journal_directory_sync,  // a new journal's name is not synced before SUPER names it
  base_before_journal,        // SUPER names the new journal before it is durable
  loose_link,                 // a new journal names a record that its predecessor may lose
  no_mirror_sync,             // the mirror journal is written but not synced
  one_manifest_sync,          // a manifest's mirror is written but not synced
  no_fence,                   // nobody looks whether another writer took over
  damage_is_tail,             // records that are damaged in both copies pass for the torn tail of a group
  in_flight_is_garbage,       // collect() judges the files of the save in flight
  no_shard_sync,              // a rank hands its row in before its shard is durable
  root_after_commit,          // COMMIT is written before the root file is durable
  stale_row,                  // a row of an earlier attempt that no commit has is accepted
  missing_row,                // a commit does not wait for every rank's row
  flush_once,                 // what is written after a save's first flush is not synced
};

}  // namespace tierload
