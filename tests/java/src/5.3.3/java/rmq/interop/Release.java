// SPDX-License-Identifier: Apache-2.0
package rmq.interop;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.util.List;
import java.util.concurrent.ConcurrentHashMap;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.remoting.protocol.filter.FilterAPI;
import org.apache.rocketmq.store.CommitLog;
import org.apache.rocketmq.store.DefaultMessageFilter;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.DispatchRequest;
import org.apache.rocketmq.store.MessageArrivingListener;
import org.apache.rocketmq.store.MessageFilter;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** Where releases differ: 5.3.3. */
final class Release {
    private Release() {
    }

    static DefaultMessageStore newStore(MessageStoreConfig config) throws IOException {
        MessageArrivingListener deaf = (topic, queueId, offset, tagsCode, time, bitMap, properties) -> { };
        BrokerStatsManager stats = new BrokerStatsManager("interop", false);
        return new DefaultMessageStore(config, stats, deaf, new BrokerConfig(), new ConcurrentHashMap<>());
    }

    static MessageExtBatch newBatch() {
        MessageExtBatch batch = new MessageExtBatch();
        batch.setPropertiesString("");
        return batch;
    }

    /** All checks of a recovery, the whole record's CRC among them when forceVerifyPropCRC is set. */
    static DispatchRequest check(CommitLog log, ByteBuffer record) {
        boolean checkDuplication = false; // concerns a property of duplicationEnable, which is off
        return log.checkMessageAndReturnSize(record, true, checkDuplication);
    }

    static MessageFilter tagFilter(String topic, String tags) {
        try {
            return tags == null ? null : new DefaultMessageFilter(FilterAPI.buildSubscriptionData(topic, tags));
        } catch (Exception error) {
            throw new IllegalArgumentException(tags, error);
        }
    }

    /** [LOWER, UPPER]. */
    static List<Long> offsetsByTime(DefaultMessageStore store, String topic, int queueId, long time) {
        return List.of(
            store.getOffsetInQueueByTime(topic, queueId, time, BoundaryType.LOWER),
            store.getOffsetInQueueByTime(topic, queueId, time, BoundaryType.UPPER));
    }
}
