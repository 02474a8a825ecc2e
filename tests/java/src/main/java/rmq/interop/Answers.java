// SPDX-License-Identifier: Apache-2.0
package rmq.interop;

import com.alibaba.fastjson.JSONArray;
import com.alibaba.fastjson.JSONObject;
import java.lang.reflect.Field;
import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.function.Function;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.SelectMappedBufferResult;
import org.apache.rocketmq.store.index.IndexService;

/**
 * What an open store says of itself, and its answers to questions.
 *
 * <p>Questions are arrays: {@code pulls} of [topic, queue id, queue offset, count, tags], {@code keys} of
 * [topic, key, count, begin, end], {@code times} of [topic, queue id, timestamp]. {@code offsets} is a broker's file of
 * consumer offsets.
 */
final class Answers {
    private static final String GROUP = "interop";
    private static final int RECORD_PHY_OFFSET = 28; // position of the record's own offset, see docs/format

    private final DefaultMessageStore store;
    private final IndexService index;
    private final Map<Long, JSONObject> pulled = new TreeMap<>();

    Answers(DefaultMessageStore store) throws ReflectiveOperationException {
        this.store = store;
        Field field = DefaultMessageStore.class.getDeclaredField("indexService");
        field.setAccessible(true);
        this.index = (IndexService) field.get(store);
    }

    JSONObject to(JSONObject questions) throws Exception {
        JSONObject answers = new JSONObject(true);
        answers.put("min_phy_offset", store.getMinPhyOffset());
        answers.put("max_phy_offset", store.getMaxPhyOffset());
        answers.put("queues", queues());
        answers.put("records", records());
        answers.put("pulls", each(questions.getJSONArray("pulls"), this::pull));
        answers.put("pulled", pulled.values());
        answers.put("keys", each(questions.getJSONArray("keys"), this::query));
        answers.put("times", each(questions.getJSONArray("times"), ask ->
            Release.offsetsByTime(store, ask.getString(0), ask.getIntValue(1), ask.getLongValue(2))));
        if (questions.containsKey("offsets")) {
            answers.put("offsets", Offsets.readAndWrite(questions.getString("offsets")));
        }
        return answers;
    }

    private static List<Object> each(JSONArray questions, Function<JSONArray, Object> answer) {
        List<Object> answers = new ArrayList<>();
        for (int i = 0; i < questions.size(); i++) {
            answers.add(answer.apply(questions.getJSONArray(i)));
        }
        return answers;
    }

    /** [topic, queue id, minimum, maximum] of each queue that has held a message. */
    private List<Object> queues() throws Exception {
        List<Object> queues = new ArrayList<>();
        Map<String, ? extends Map<Integer, ?>> table = store.getConsumeQueueTable();
        for (String topic : table.keySet()) {
            for (int id : table.get(topic).keySet()) {
                long max = store.getMaxOffsetInQueue(topic, id);
                if (max > 0) {
                    queues.add(List.of(topic, id, store.getMinOffsetInQueue(topic, id), max));
                }
            }
        }
        return queues;
    }

    /** Every record of the log, as looked up by its offset; each passes the checks of RocketMQ's recovery. */
    private List<Object> records() {
        List<Object> records = new ArrayList<>();
        long segmentSize = store.getMessageStoreConfig().getMappedFileSizeCommitLog();
        long phyOffset = store.getMinPhyOffset();
        while (phyOffset < store.getMaxPhyOffset()) {
            SelectMappedBufferResult rest = store.getCommitLogData(phyOffset);
            DispatchRequest checked = Release.check(store.getCommitLog(), rest.getByteBuffer());
            rest.release();
            if (!checked.isSuccess()) {
                throw new IllegalStateException("no good record at " + phyOffset);
            }
            if (checked.getMsgSize() == 0) {
                phyOffset = (phyOffset / segmentSize + 1) * segmentSize; // a blank record fills the segment
                continue;
            }
            JSONObject record = Messages.json(store.lookMessageByOffset(phyOffset));
            record.put("tags_code", checked.getTagsCode());
            records.add(record);
            phyOffset += checked.getMsgSize();
        }
        return records;
    }

    private JSONObject pull(JSONArray ask) {
        String topic = ask.getString(0);
        GetMessageResult result = store.getMessage(GROUP, topic, ask.getIntValue(1), ask.getLongValue(2),
            ask.getIntValue(3), Release.tagFilter(topic, ask.getString(4)));
        try {
            JSONObject json = new JSONObject(true);
            json.put("status", result.getStatus());
            json.put("next", result.getNextBeginOffset());
            json.put("min", result.getMinOffset());
            json.put("max", result.getMaxOffset());
            json.put("messages", result.getMessageMapedList().stream().map(this::decode).toList());
            return json;
        } finally {
            result.release();
        }
    }

    /** Offset and size of a pulled message, which is also kept, its body decompressed. */
    private List<Number> decode(SelectMappedBufferResult message) {
        pulled.computeIfAbsent(message.getStartOffset(), at ->
            Messages.json(MessageDecoder.decode(message.getByteBuffer().slice(), true, true)));
        return List.of(message.getStartOffset(), message.getSize());
    }

    /** Offsets as the index gives them, newest first; and as a query gives their records. */
    private JSONObject query(JSONArray ask) {
        String topic = ask.getString(0);
        String key = ask.getString(1);
        int count = ask.getIntValue(2);
        long begin = ask.getLongValue(3);
        long end = ask.getLongValue(4);
        List<Long> found = new ArrayList<>();
        QueryMessageResult result = store.queryMessage(topic, key, count, begin, end);
        for (ByteBuffer record : result.getMessageBufferList()) {
            found.add(record.getLong(record.position() + RECORD_PHY_OFFSET));
        }
        result.release();
        JSONObject json = new JSONObject(true);
        json.put("index", index.queryOffset(topic, key, count, begin, end).getPhyOffsets());
        json.put("found", found);
        return json;
    }
}
