// SPDX-License-Identifier: Apache-2.0
package rmq.interop;

import java.util.ArrayList;
import java.util.List;
import java.util.concurrent.ConcurrentMap;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;

/** What a broker's ConsumerOffsetManager, which is not among the store classes, makes JSON of and of JSON. */
public final class Offsets {
    private ConcurrentMap<String, ConcurrentMap<Integer, Long>> offsetTable;

    public ConcurrentMap<String, ConcurrentMap<Integer, Long>> getOffsetTable() {
        return offsetTable;
    }

    public void setOffsetTable(ConcurrentMap<String, ConcurrentMap<Integer, Long>> offsetTable) {
        this.offsetTable = offsetTable;
    }

    /** [topic@group, queue id, offset] of a file, which is then written as a broker writes it. */
    static List<List<Object>> readAndWrite(String path) throws Exception {
        Offsets found = RemotingSerializable.fromJson(MixAll.file2String(path), Offsets.class);
        MixAll.string2File(RemotingSerializable.toJson(found, true), path);
        List<List<Object>> rows = new ArrayList<>();
        found.offsetTable.forEach((key, queues) -> queues.forEach((id, offset) -> rows.add(List.of(key, id, offset))));
        return rows;
    }
}
