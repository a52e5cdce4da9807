// Records of the journal as Python values.
#include <cstdio>

#include "bind/store.h"
#include "tierload/bytes.h"

namespace tierload {
namespace {

nb::object optional_bytes(const std::optional<std::string>& text) {
  return text ? nb::object(to_bytes(*text)) : nb::none();
}

}  // namespace

std::string hex_of(const Digest& digest) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(digest.high),
                static_cast<unsigned long long>(digest.low));
  return text;
}

// (lsn, kind, time, key, before, after, txid) with bytes for texts, newest first.
nb::list history(Catalog& catalog, uint64_t after) {
  std::vector<Record> records;
  {
    const nb::gil_scoped_release release;
    records = catalog.records_after(after);
  }
  nb::list out;
  const auto add = [&](const Record& record, const char* kind, std::string_view key, nb::object before,
                       nb::object now) {
    out.append(nb::make_tuple(record.lsn, kind, record.time, to_bytes(key), before, now, record.txid));
  };
  for (const Record& record : records) {
    switch (record.type) {
      case RecordType::snapshot:
        add(record, "snapshot", "", nb::none(), nb::none());
        break;
      case RecordType::commit: {
        const CommitPtr commit = decode_commit(record.payload, record.lsn, record.time);
        add(record, commit->rollback ? "rollback" : "commit", "", nb::none(), nb::cast(hex_of(commit->id)));
        break;
      }
      case RecordType::change: {
        const Change change = decode_change(record.payload);
        add(record, "change", change.key, optional_bytes(change.before), optional_bytes(change.after));
        break;
      }
      case RecordType::tag: {
        const TagChange tag = decode_tag(record.payload);
        add(record, "tag", tag.name, nb::cast(tag.before), nb::cast(tag.after));
        break;
      }
      case RecordType::collect: {
        nb::list dropped;
        for (const CommitPtr& commit : decode_collect(record.payload)) dropped.append(hex_of(commit->id));
        add(record, "collect", "", dropped, nb::none());
        break;
      }
      default:
        add(record, "other", "", nb::none(), nb::none());
    }
  }
  return out;
}

}  // namespace tierload
